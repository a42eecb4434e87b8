"""A rank for which there is no memory is said to be one, whoever refused it."""

import os
import signal
from pathlib import Path

from services.contract.messages.facts import GangEnded, GangProgressed
from services.worker.agent.gangs.decisions import GangState, RankState
from services.worker.agent.gangs.exit_order import exits
from services.worker.agent.host.memory_events import oom_kills
from services.worker.agent.telemetry.gang_telemetry import LastPhase
from tests.agent.conftest import (
    FOREVER,
    JOB,
    AgentProcess,
    Controller,
    ended,
    launch,
    launched,
)


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


def dies_at(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def test_a_rank_that_the_kernel_killed_for_memory_is_told_from_one_that_somebody_killed() -> None:
    rank = RankState(0, os.getpid(), signal=int(signal.SIGKILL))
    state = GangState(job_id=JOB, fence=1, node_id="n", ranks={0: rank})
    told = [exits(state, {0: LastPhase(1, "IDLE")}, kills)[0].error for kills in (0, 1)]
    assert told[0] == "ended by SIGKILL"
    assert told[1] is not None
    assert told[1].startswith("ended by SIGKILL: the kernel killed it, for the node had no memory")


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
