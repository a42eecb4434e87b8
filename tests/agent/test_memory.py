"""A rank for which there is no memory is said to be one, whoever refused it."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.contract.messages.facts import GangEnded, GangProgressed
from services.contract.words.states import FailureClass
from services.controller.domain.decisions.diagnose import classify
from services.controller.domain.job.attempt import Attempt, Failure
from services.worker.agent.gangs.exit_order import aborted_for_memory, exits, lost_thread
from services.worker.agent.gangs.state import GangState, RankState
from services.worker.agent.host.memory_events import oom_kills
from services.worker.agent.telemetry.gang_telemetry import LastPhase
from services.worker.rank.process.host_memory import ThreadRefusals
from tests.agent.conftest import (
    FOREVER,
    JOB,
    NODE,
    AgentProcess,
    Controller,
    ended,
    launch,
    launched,
)
from tests.waiting import until

GROUPS = Path("/sys/fs/cgroup")
MEMORY = GROUPS / "memory"
"""Where version 1 has a hierarchy of its own for it."""


def test_a_rank_beyond_its_limit_ends_with_the_limit_and_what_to_do_and_the_node_goes_on(
    agent: AgentProcess, controller: Controller
) -> None:
    command = launch(1, 2, FOREVER, pause_s=0.01, then="take memory")
    resources = command.spec.resources.model_copy(update={"memory_gib": 0.5})
    limited = command.spec.model_copy(update={"resources": resources})
    controller.send(command.model_copy(update={"spec": limited}))
    first, *_ = sorted(ended(controller).exits, key=lambda exit_: exit_.order)
    assert first.rank == 1
    assert "builtins.MemoryError" in first.error_types
    assert first.error == (
        "MemoryError (this rank may take 0.5 GiB: raise resources.memory_gib, lower "
        "train.micro_batch, or shard over more ranks)"
    )
    controller.open_job(fence=2)
    controller.send(launch(2, 2, FOREVER, pause_s=0.01))
    controller.fact(GangProgressed, lambda fact: fact.fence == 2)
    pid = launched(controller, fence=2).pids[0]
    assert dies_at(pid) == min(dies_at(agent.process.pid) + 500, 999)
    assert dies_at(agent.warm().pid) == dies_at(agent.process.pid)
    assert not [fact for fact in controller.all_of(GangEnded) if fact.fence == 2]
    assert agent.process.poll() is None


@pytest.mark.parametrize(
    ("then", "words", "kind"),
    [
        ("abort for memory", "ended by SIGABRT: the system refused memory", None),
        (
            "lose a thread",
            "RuntimeError: nothing came of it; the system refused memory: MemoryError",
            (),
        ),
        ("hide a refusal", "RuntimeError: no batch; the system refused memory: MemoryError", ()),
    ],
)
def test_a_refusal_that_is_not_the_last_error_of_its_rank_is_told_as_want_of_memory(
    agent: AgentProcess, controller: Controller, then: str, words: str, kind: tuple[()] | None
) -> None:
    controller.send(launch(1, 2, FOREVER, pause_s=0.01, then=then))
    first, *_ = sorted(ended(controller).exits, key=lambda exit_: exit_.order)
    assert first.rank == 1
    assert (first.error or "").startswith(words), first
    assert kind is None or "builtins.MemoryError" in first.error_types
    failure = Failure(
        rank=1,
        node_id=NODE,
        signal=first.signal,
        error=first.error,
        error_types=first.error_types,
        traceback=first.traceback,
    )
    attempt = Attempt(fence=1, world_size=2, incarnations={NODE: "life"}, started_ms=1)
    assert classify(attempt, failure) is FailureClass.OUT_OF_MEMORY
    assert agent.process.poll() is None


def test_words_in_a_log_explain_an_abort_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("std::bad_alloc\n")
    aborted = RankState(0, os.getpid(), signal=int(signal.SIGABRT))
    assert aborted_for_memory(aborted, log)
    assert not aborted_for_memory(replace(aborted, signal=int(signal.SIGSEGV)), log)
    log.write_text("assertion failed\n")
    assert not aborted_for_memory(aborted, log)
    log.unlink()
    os.mkfifo(log)
    assert not aborted_for_memory(aborted, log)


def test_a_thread_that_was_refused_memory_long_before_explains_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    at = [3]
    refusals = ThreadRefusals(lambda: at[0])
    refusals.watch()
    for target, known in ((lambda: int("no"), False), (lambda: bytearray(1 << 45), True)):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
        assert (refusals.before(4) is not None) is known
    assert refusals.before(5) is None


def dies_at(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def test_a_rank_that_the_kernel_killed_for_memory_is_told_from_one_that_somebody_killed() -> None:
    rank = RankState(0, os.getpid(), signal=int(signal.SIGKILL))
    state = GangState(job_id=JOB, fence=1, node_id="n", ranks={0: rank})
    told = [exits(state, {0: LastPhase(1, "IDLE")}, kills)[0].error for kills in (0, 1)]
    assert told[0] == "ended by SIGKILL"
    assert told[1] is not None
    assert told[1].startswith(
        "ended by SIGKILL: the kernel killed it, because the node was out of memory"
    )


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group whose processes have 512 MiB; skips the test where none can be made."""
    own = MEMORY if MEMORY.is_dir() else GROUPS
    group = own / f"meshloom-test-{os.getpid()}"
    limit = "memory.limit_in_bytes" if own == MEMORY else "memory.max"
    try:
        group.mkdir()
        (group / limit).write_text(str(1 << 29))
    except OSError as error:
        pytest.skip(f"no control group can be made that limits memory: {error}")
    yield group
    # The process that ranks are forked from waits a while for the next agent.
    for pid in (group / "cgroup.procs").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    until(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def test_a_rank_that_the_kernel_really_killed_for_memory_is_told_as_such_and_its_node_goes_on(
    small_group: Path, agent: AgentProcess, controller: Controller
) -> None:
    until(agent.marked)
    for pid in (agent.process.pid, agent.template().pid, agent.warm().pid):
        (small_group / "cgroup.procs").write_text(str(pid))
    controller.send(launch(1, 2, FOREVER, pause_s=0.01, then="fill memory"))
    fact = ended(controller)
    (killed,) = [exit_ for exit_ in fact.exits if exit_.rank == 1]
    assert killed.signal == signal.SIGKILL
    words = "ended by SIGKILL: the kernel killed it, because the node was out of memory"
    assert (killed.error or "").startswith(words)
    life = {NODE: "life"}
    attempt = Attempt(
        fence=1, world_size=2, incarnations=life, started_ms=1, oom_kills=fact.oom_kills
    )
    failure = Failure(rank=1, node_id=NODE, signal=killed.signal, error=killed.error)
    assert classify(attempt, failure) is FailureClass.OUT_OF_MEMORY
    controller.open_job(fence=2)
    controller.send(launch(2, 2, FOREVER, pause_s=0.01))
    controller.fact(GangProgressed, lambda fact: fact.fence == 2)
    assert agent.process.poll() is None


def test_kills_are_counted_by_the_control_group_or_else_by_the_machine(tmp_path: Path) -> None:
    own, machine = tmp_path / "cgroup", tmp_path / "vmstat"
    machine.write_text("pgfault 7\noom_kill 3\n")
    own.write_text("0::/agents\n")
    assert oom_kills(own, tmp_path, machine) == 3
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    assert oom_kills(own, tmp_path, machine) == 1
    own.unlink()
    assert oom_kills(own, tmp_path, machine) == 3


def test_a_thread_that_was_refused_memory_is_seen_in_what_python_tells_of_it(
    tmp_path: Path,
) -> None:
    code = "import threading; t = threading.Thread(target=lambda: {}); t.start(); t.join()"
    log = tmp_path / "log"
    for act, is_lost in (("bytes(1 << 62)", True), ("1 / 0", False)):
        program = [sys.executable, "-c", code.format(act)]
        with log.open("wb") as file:
            subprocess.run(program, stderr=file, check=True)
        assert b"Exception in thread" in log.read_bytes()
        assert lost_thread(log) is is_lost
    log.write_text("Exception in thread a:\nValueError: b\nMemoryError was handled\n")
    assert not lost_thread(log)
