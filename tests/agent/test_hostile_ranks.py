"""Ranks that do what none of ours does, beside ranks that train, on one node."""

import asyncio
import contextlib
import fcntl
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import cast

import pytest
from structlog.testing import capture_logs

from services.contract.messages.board import BoardError, BoardReader, BoardStep, BoardWriter
from services.contract.messages.commands import PurgeJob, StopGang
from services.contract.messages.facts import (
    CheckpointCorrupt,
    CheckpointLost,
    CheckpointVoted,
    Evaluated,
    Fact,
    GangEnded,
    JobPurged,
)
from services.contract.messages.rank_pipe import RankVote
from services.contract.redis import redis_keys
from services.contract.storage.manifests import ShardFile
from services.contract.system.durable import open_plain
from services.contract.system.mask import Mask
from services.contract.system.pipe_end import PipeEnd
from services.contract.words.bounds import MOST_MS
from services.contract.words.ids import checkpoint_id, new_job_id
from services.worker.agent.gangs import runtime
from services.worker.agent.gangs.events import Condemned
from services.worker.agent.gangs.runtime import GangRuntime
from services.worker.agent.host.folders import AttemptFolder, NodeFolder
from services.worker.agent.host.processes import is_dying, kill_tracers
from services.worker.agent.node_commands import NodeCommands
from services.worker.agent.ranks import rank_link
from services.worker.agent.ranks.launch import Crew
from services.worker.agent.ranks.rank_link import RankLink
from services.worker.agent.storage.job_storage import Storage
from services.worker.agent.storage.shared_files import FolderFiles
from services.worker.agent.supervisor import Supervisor
from services.worker.agent.telemetry import gang_logs, log_tail
from services.worker.agent.telemetry.gang_logs import GangLogs
from services.worker.agent.telemetry.gang_telemetry import step_record
from services.worker.agent.telemetry.log_tail import FILE_BYTES, LogTail
from tests.agent.conftest import (
    FOREVER,
    JOB,
    NODE,
    AgentProcess,
    Controller,
    ended,
    is_gone,
    launch,
    running,
)
from tests.agent.programs.misdeeds import MISDEEDS
from tests.agent.test_forked_for_nothing import NoNodeCommands
from tests.agent.test_forkers import forkers
from tests.agent.test_metrics import watched
from tests.waiting import until

WORDS = {
    "phase": "rank 1 wrote phase 99 to its board",
    "unit": "rank 1 wrote unit -7 to its board",
    "seconds": "rank 1 wrote a step of -1.0 s to its board",
    "sequence": f"rank 1 wrote collective {-(2**63)} to its board",
    "board cut": "rank 1 made its board 0 bytes long",
    "board grown": "rank 1 made its board 1048576 bytes long",
    "not a message": "rank 1 wrote a line to its pipe that is not a message: Invalid JSON",
    "long line": "rank 1 wrote a line of more than 1048576 bytes to its pipe",
    "endless line": "rank 1 wrote a line of more than 1048576 bytes to its pipe",
    "negative step": "rank 1 wrote a line to its pipe that is not a message: rank_evaluated/step",
    "endless number": "rank 1 wrote a line to its pipe that is not a message: rank_epoch_broken/epoch",
    "others' checkpoint": "rank 1 reported checkpoint ckpt_01hf7yat00000000000000zzzz",
    "another's vote": "rank 1 voted for rank 0",
    "child writes nonsense": "",
    "child writes on": "exited with code 7",
    "name": "rank 1 wrote a line to its pipe that is not a message: Invalid JSON",
    "traced": "exited with code 7",
    "traced by its parent": "ended by SIGKILL",
    "traced at its end": "exited with code 7",
    **dict.fromkeys(
        (
            *("log folder: pipe", "log folder: link", "board folder: pipe", "board folder: link"),
            *("storage: pipe", "storage: link", "chain: pipe", "chain: file"),
            *("descriptors", "hangs up", "log kept from"),
        ),
        "exited with code 7",
    ),
    "stranger": "exited with code 7",
    "log cut": "exited with code 7",
    "log cut while it is read": "exited with code 7",
    "log replaced": "exited with code 7",
}


@pytest.mark.timeout(500)
def test_hostile_ranks_end_their_own_gangs_with_the_reason_while_an_innocent_one_trains_on(
    agent: AgentProcess, controller: Controller
) -> None:
    running(controller, evaluates=True)  # more often than 64 times a second, which is no fault
    began = time.monotonic()
    jobs = {
        deed: new_job_id(1_700_000_000_000, bytes([number] * 10))
        for number, deed in enumerate(MISDEEDS, start=1)
    }
    for deed, job in jobs.items():
        controller.client.hset(redis_keys.job(job), "fence", "1")
        hostile = launch(1, 2, FOREVER, pause_s=0.01, misdeed=deed)
        controller.send(hostile.model_copy(update={"job_id": job}))
    lasting = {jobs["flood"], jobs["traced at its end"]}
    until(
        lambda: {end.job_id for end in controller.all_of(GangEnded)} >= {*jobs.values()} - lasting,
        timeout_s=240,
        every_s=0.5,
    )
    told = [fact.job_id for fact in controller.all_of(Evaluated)].count(jobs["flood"])
    assert 64 < told < 1_000 + 64 * (time.monotonic() - began)
    controller.send(*(StopGang(job_id=job, fence=1, mode="kill") for job in lasting))
    until(lambda: {end.job_id for end in controller.all_of(GangEnded)} >= lasting)
    assert not any(end.hang for end in controller.all_of(GangEnded) if end.job_id in lasting)
    ends = {end.job_id: end for end in controller.all_of(GangEnded)}
    for deed, words in WORDS.items():
        first = ends[jobs[deed]].exits[0]
        assert first.rank == 1, deed
        assert words in (first.error or ""), deed
    assert len(controller.all_of(GangEnded)) == len(jobs)
    stranger = agent.folder.attempt(jobs["stranger"], 1).path / "stranger"
    until(lambda: is_gone(int(stranger.read_text())))
    assert controller.all_of(CheckpointCorrupt) == []
    assert controller.all_of(CheckpointVoted) == []
    spoilt = {job for deed, job in jobs.items() if deed.startswith(("storage", "chain"))}
    for job in spoilt:
        controller.client.hset(redis_keys.job(job), "fence", "2")
        again = launch(2, 1).model_copy(update={"job_id": job})
        controller.send(again, PurgeJob(job_id=job, fence=2))
    until(lambda: {fact.job_id for fact in controller.all_of(JobPurged)} == spoilt)
    assert {fact.error for fact in controller.all_of(JobPurged)} == {None}
    last = len(controller.steps())
    until(lambda: len(controller.steps()) > last + 50)
    assert agent.process.poll() is None
    controller.send(StopGang(job_id=JOB, fence=1, mode="drain"))
    end = controller.fact(GangEnded, lambda fact: fact.job_id == JOB)
    assert all(e.drained for e in end.exits)
    boards = [agent.folder.attempt(job, 1).boards for job in jobs.values()]
    until(lambda: not any(path.exists() for path in boards))  # they are removed beside the loop


def test_a_step_that_ended_after_the_last_year_ended_at_no_known_time() -> None:
    step = BoardStep(1, 1.0, 1.0, 1.0, 1.0, 1.0, ended_ms=MOST_MS)
    assert step_record(step, fence=1).time_ms == MOST_MS
    assert step_record(replace(step, ended_ms=MOST_MS + 1), fence=1).time_ms is None


def test_a_board_that_is_cut_before_its_agent_ever_looked_is_seen_to_be(tmp_path: Path) -> None:
    attempt = NodeFolder(tmp_path, NODE, shared_memory=tmp_path).attempt(JOB, 1)
    boards = attempt.open(launch().plan.ranks)
    assert boards is not None
    os.truncate(attempt.board(0), 0)
    attempt.board(1).unlink()
    os.mkfifo(attempt.board(1))
    telemetry = watched(tmp_path, boards)
    assert [telemetry.begun(rank) for rank in boards] == [None, None]
    assert telemetry.faults == {0: "made its board 0 bytes long; a board has 65536"}
    assert list(telemetry.marks()) == [1]  # though its name leads elsewhere
    telemetry.close()


@pytest.mark.timeout(30)  # whoever opens a leased file without a word waits for 45 s
def test_what_another_rank_put_in_place_of_boards_holds_up_no_launch(tmp_path: Path) -> None:
    attempt = NodeFolder(tmp_path, NODE, shared_memory=tmp_path).attempt(JOB, 1)
    attempt.boards.mkdir(parents=True)
    os.mkfifo(attempt.board(0))
    others = attempt.board(1), tmp_path / "put there by a rank that is quicker"
    noticed = signal.signal(signal.SIGIO, signal.SIG_IGN)
    with contextlib.ExitStack() as closing:
        closing.callback(signal.signal, signal.SIGIO, noticed)
        for place in others:
            leased = os.open(place, os.O_RDWR | os.O_CREAT)
            closing.callback(os.close, leased)
            fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        boards = attempt.open(launch().plan.ranks)
        with pytest.raises(OSError, match="exists"):
            BoardReader.make(others[1])
        with pytest.raises(BlockingIOError):
            BoardWriter.create(others[1], fence=1)
    assert boards is not None
    for board in boards.values():
        assert board.read() is None
        board.close()


def test_a_rank_that_is_started_again_is_not_charged_with_its_board_before(tmp_path: Path) -> None:
    attempt = NodeFolder(tmp_path, NODE, shared_memory=tmp_path).attempt(JOB, 1)
    boards = attempt.open(launch().plan.ranks)
    assert boards is not None
    os.truncate(attempt.board(1), 0)
    telemetry, seats = watched(tmp_path, boards), watched(tmp_path)._seats
    telemetry.begun(1)
    assert list(telemetry.faults) == [1]
    again = attempt.renew_boards((1,))
    telemetry.replace(Crew(seats={1: seats[1]}, store=None, pids={1: 2}, pipes={}, boards=again))
    telemetry.begun(1)
    assert telemetry.faults == {}
    telemetry.close()


def test_boards_are_closed_beside_the_loop(tmp_path: Path) -> None:
    """Who closes one last frees what its rank has given it beyond its end: gigabytes, in seconds."""
    attempt = NodeFolder(tmp_path, NODE, shared_memory=tmp_path).attempt(JOB, 1)
    boards = attempt.open(launch().plan.ranks)
    assert boards is not None
    telemetry = watched(tmp_path, boards)
    beside: list[Callable[[], None]] = []
    telemetry._beside = beside.append
    os.truncate(attempt.board(0), 0)
    assert telemetry.begun(0) is None
    telemetry.close()
    assert [closes() for closes in beside] == [None, None]
    with pytest.raises(BoardError, match="Bad file descriptor"):
        boards[1].read()


def test_of_logs_that_are_too_long_the_last_part_of_one_is_kept_at_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang_logs, "LOOK_EVERY_S", 0.0)
    logs = [
        tmp_path / f"rank-{rank}.{name}.log" for rank in range(2) for name in ("stdout", "stderr")
    ]
    telemetry = watched(tmp_path)
    for kept in (1, 2, 3, 4):
        for log in logs:
            log.touch()
            os.truncate(log, FILE_BYTES + 1)
        telemetry.watch({0: None, 1: None})
        assert len(list(tmp_path.glob("*.1"))) == kept
        # What was kept a moment ago is started over at once.
        assert [log.stat().st_size <= FILE_BYTES for log in logs].count(True) == kept


def test_of_logs_that_take_long_to_mask_one_is_at_a_time_and_another_waits_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread that masks has the agent's loop wait for its turn: 24 ranks had it 5 s late, and a job stopped after 14 s."""
    worked_s = 0.0
    monkeypatch.setattr(
        log_tail,
        "time",
        SimpleNamespace(monotonic=lambda: 0.0, thread_time=lambda: worked_s),
    )
    masked: list[bool] = []

    class Noting(Mask):
        def text(self, text: str) -> str:
            nonlocal worked_s
            masked.append(log_tail.ONE_AT_A_TIME.locked())
            worked_s += 1.0 if text.startswith("long") else 0.0
            return text

    tails = [LogTail(tmp_path / f"{rank}.log", Noting({})) for rank in range(2)]
    lines: dict[int, int] = {}

    def write_and_read(rank: int, line: str, *, waits: bool = True) -> int:
        with (tmp_path / f"{rank}.log").open("a") as file:
            file.write(f"{line}\n")
        lines[rank] = len(tails[rank].read(10, waits=waits))
        return lines[rank]

    assert [write_and_read(0, "x" * 20_000), write_and_read(1, "long")] == [1, 1]
    lines.clear()
    waiting = threading.Thread(target=write_and_read, args=(1, "short"))
    with log_tail.ONE_AT_A_TIME:
        waiting.start()
        assert write_and_read(0, "x" * 20_000) == 1
        assert 1 not in lines
    waiting.join()
    assert lines[1] == 1
    assert masked == [False, False, True, True]  # by the test; by its own thread
    with log_tail.ONE_AT_A_TIME:
        assert write_and_read(1, "in the agent's loop", waits=False) == 1
        with (tmp_path / "1.log").open("a") as file:
            file.write("its ranks have ended\n")
        tails[1].end()
        assert len(tails[1].read(10)) == 1
    assert log_tail.ONE_AT_A_TIME.acquire(blocking=False)
    log_tail.ONE_AT_A_TIME.release()


def test_a_log_that_turns_out_to_take_long_makes_others_wait_for_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 ranks that begin so at one moment had the agent's loop 7 s late: none was known to take long yet."""
    worked_s = 0.0
    monkeypatch.setattr(
        log_tail,
        "time",
        SimpleNamespace(monotonic=lambda: 0.0, thread_time=lambda: worked_s),
    )
    turns: list[tuple[bool, bool]] = []

    class Noting(Mask):
        def text(self, text: str) -> str:
            nonlocal worked_s
            locks = log_tail.ONE_OF_THE_OTHERS, log_tail.ONE_AT_A_TIME
            turns.append((locks[0].locked(), locks[1].locked()))
            worked_s += 0.1
            return text

    log = tmp_path / "0.log"
    log.write_text("a line\n" * 10)
    tail = LogTail(log, Noting({}))
    assert [len(tail.read(10)) for _ in range(5)] == [1, 3, 3, 3, 0]
    assert turns == [(True, False)] + [(False, True)] * 9
    # Of a line that is very long the first one may take seconds.
    log.write_text(f"{'x' * 40_000}\n")
    assert len(LogTail(log, Noting({})).read(10)) == 1
    assert turns[-1] == (False, True)


def test_a_log_that_waits_for_its_turn_can_be_started_over_and_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_open = threading.Event()

    def noting(path: Path) -> int:
        is_open.set()
        return open_plain(path)

    monkeypatch.setattr(log_tail, "FILE_BYTES", 1_000)
    monkeypatch.setattr(log_tail, "open_plain", noting)
    log = tmp_path / "0.log"
    log.write_text("".join(f"line {number}\n" for number in range(200)))
    tail, read = LogTail(log), Queue[list[str]]()

    def read_all() -> None:
        read.put([line.text for line in tail.read(1_000)])

    reading = threading.Thread(target=read_all)
    with log_tail.ONE_OF_THE_OTHERS:
        reading.start()
        assert is_open.wait(60)
        assert tail.cut_back()  # once it has read the file
    reading.join()
    read_all()
    lines = [
        text for each in (read.get(), read.get()) for text in each if "bytes until" not in text
    ]
    assert lines == [f"line {number}" for number in range(200)]


def test_the_loop_waits_for_lines_of_one_gang_and_not_of_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[GangLogs] = []
    begun: list[GangLogs] = []

    class Counting(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(begun[-1])
            return super().wait(timeout)

    clock = SimpleNamespace(monotonic=lambda: 100.0, time_ns=time.time_ns)
    monkeypatch.setattr(gang_logs, "time", clock)
    monkeypatch.setattr(gang_logs, "threading", SimpleNamespace(Event=Counting))
    monkeypatch.setattr(GangLogs, "_waits_from", 0.0)
    gangs = []
    for name in ("ann", "sam", "joe"):
        folder = tmp_path / name
        folder.mkdir()
        gangs.append(watched(folder)._logs)
        gangs[-1]._beside = lambda work: threading.Thread(target=work).start()
        (folder / "rank-0.stdout.log").write_text("a line\n")
    with log_tail.ONE_OF_THE_OTHERS:
        for each in gangs:
            begun.append(each)
            assert each.take(last=False) == ()
    assert waits == gangs[:1]
    for each in gangs:
        until(lambda each=each: each.take(last=False))  # type: ignore[misc] # a default


def test_the_loop_does_not_wait_again_for_logs_that_took_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, waits = [0.0], [0]

    class Counting(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits[0] += 1
            return super().wait(timeout)

    monkeypatch.setattr(
        gang_logs, "time", SimpleNamespace(monotonic=lambda: now[0], time_ns=time.time_ns)
    )
    monkeypatch.setattr(gang_logs, "threading", SimpleNamespace(Event=Counting))
    seconds = [1.0]

    class Slow(Mask):
        def text(self, text: str) -> str:
            now[0] += seconds[0]
            return text

    log = tmp_path / "rank-0.stdout.log"
    logs = watched(tmp_path)._logs
    for tail in logs._tails.values():
        tail._mask = Slow({})

    def take() -> int:
        with log.open("a") as file:
            file.write("a line\n")
        assert len(logs.take(last=False)) == 1
        return waits[0]

    monkeypatch.setattr(GangLogs, "_waits_from", 0.0)
    assert [take(), take(), take()] == [1, 1, 1]
    seconds[0] = 0.0
    assert [take(), take(), take()] == [1, 2, 3]


def gang_of(
    pid: int, root: Path, attempt: AttemptFolder, tell: Callable[[Fact], None] = lambda _: None
) -> GangRuntime:
    """A gang of one rank, which has neither pipe nor board."""
    seats = {0: watched(root)._seats[0]}
    crew = Crew(seats=seats, store=None, pids={0: pid}, pipes={}, boards={})
    return GangRuntime(crew, NODE, attempt, FolderFiles(root), tell)


@pytest.mark.parametrize("blank_bytes", [20_000, 1_000])
def test_the_last_words_of_many_ranks_that_end_at_once_are_not_heard_without_a_break(
    blank_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte of each may take half a second, and so may a hundred short lines: the node's lease ran out meanwhile."""
    now = [0.0]

    class Slow(Mask):
        def message(self, line: bytes) -> bytes:
            now[0] += 0.4
            return line

    monkeypatch.setattr(rank_link, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for share in ("_of_all", "_of_little"):
        monkeypatch.setattr(RankLink, share, rank_link._Share())
    attempt = NodeFolder(tmp_path, NODE, shared_memory=tmp_path).attempt(JOB, 1)
    attempt.path.mkdir(parents=True)

    async def run(pids: dict[int, int]) -> None:
        seats, pipes = watched(tmp_path)._seats, {rank: PipeEnd.pair() for rank in pids}
        ours = {rank: ends[0] for rank, ends in pipes.items()}
        crew = Crew(seats=seats, store=None, pids=pids, pipes=ours, boards={})
        gang = GangRuntime(crew, NODE, attempt, FolderFiles(tmp_path), lambda _: None)
        gang._telemetry.mask = Slow({})
        gang.connect()
        for _, theirs in pipes.values():
            said = b'{"kind":"rank_finished","step":3,"drained":false}\n'
            os.write(theirs.writing, b" " * blank_bytes + said)
            theirs.close()
        for pid in pids.values():
            gang.reaped(pid, 0, None)
            assert not gang.has(pid)
        assert gang.living is not None
        assert gang.living.ranks == (1,)
        gang.tick()
        assert not gang.ended
        now[0] += 0.5
        gang.tick()
        assert gang.ended
        assert [told.error for told in gang.end().exits] == [None, None]

    with subprocess.Popen(["true"]) as one, subprocess.Popen(["true"]) as other:
        asyncio.run(run({0: one.pid, 1: other.pid}))


@pytest.mark.parametrize("little", [True, False])
def test_a_rank_whose_last_words_wait_for_those_of_others_does_not_hang(
    little: bool,  # noqa: FBT001 the case
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job that failed by its own mistake was told to hang, and used up a restart; short words are heard at once."""
    now = [0.0]
    monkeypatch.setattr(RankLink, "_of_little", rank_link._Share())
    monkeypatch.setattr(runtime, "time", SimpleNamespace(monotonic=lambda: now[0]))
    attempt = NodeFolder(tmp_path, NODE, shared_memory=tmp_path).attempt(JOB, 1)
    attempt.path.mkdir(parents=True)

    async def run(pid: int) -> None:
        ours, theirs = PipeEnd.pair()
        boards = {0: BoardReader.make(tmp_path / "board")}
        seats = {0: watched(tmp_path)._seats[0]}
        crew = Crew(seats=seats, store=None, pids={0: pid}, pipes={0: ours}, boards=boards)
        gang = GangRuntime(crew, NODE, attempt, FolderFiles(tmp_path), lambda _: None)
        gang.connect()
        said = b'{"kind":"rank_failed","error":"ValueError: mine","traceback":"","step":3}\n'
        os.write(theirs.writing, said if little else b" " * 20_000 + said)
        theirs.close()
        gang.tick()
        monkeypatch.setattr(RankLink._of_all, "_rests_until", math.inf)
        gang.reaped(pid, 1, None)
        assert gang.ended is little
        for _ in range(1000):
            now[0] += 0.4
            gang.tick()
            await asyncio.sleep(0)
        assert gang._state.hung_at is None
        monkeypatch.setattr(RankLink._of_all, "_rests_until", 0.0)
        gang.tick()
        assert [each.error for each in gang.end().exits] == ["ValueError: mine"]

    with subprocess.Popen(["true"]) as dead:
        asyncio.run(run(dead.pid))


def test_what_a_rank_left_behind_cannot_keep_its_gang_from_its_end_by_votes_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job was told to run for ever, with no process of its ranks, until somebody stopped it."""
    now = [0.0]
    monkeypatch.setattr(runtime, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(RankLink, "_of_all", rank_link._Share())
    attempt = NodeFolder(tmp_path, NODE, shared_memory=tmp_path).attempt(JOB, 1)
    attempt.path.mkdir(parents=True)
    asked: list[int] = []

    async def run(pid: int) -> None:
        ours, theirs = PipeEnd.pair()
        seats = {0: watched(tmp_path)._seats[0]}
        crew = Crew(seats=seats, store=None, pids={0: pid}, pipes={0: ours}, boards={})
        gang = GangRuntime(crew, NODE, attempt, FolderFiles(tmp_path), lambda _: None)
        monkeypatch.setattr(gang._votes, "check", lambda _, vote: asked.append(vote.step))
        gang.connect()
        os.write(theirs.writing, b'{"kind":"rank_finished","step":3,"drained":false}\n')
        gang.reaped(pid, 0, None)
        for step in (4, 5, 6):
            shard = ShardFile(rank=0, name="shard", bytes=1, sha256="0" * 64)
            named = checkpoint_id(JOB, step, 1)
            vote = RankVote(checkpoint_id=named, step=step, shard=shard)
            with contextlib.suppress(BrokenPipeError):
                os.write(theirs.writing, vote.model_dump_json().encode() + b"\n")
            assert gang.silent() is (step > 4)
            now[0] += 3.0
        theirs.close()

    with subprocess.Popen(["true"]) as dead:
        asyncio.run(run(dead.pid))
    assert asked == [4, 5]


def test_votes_that_are_refused_make_the_agents_log_no_longer(tmp_path: Path) -> None:
    """A rank may send them for as long as it lives, and nobody can purge that log."""
    attempt = NodeFolder(tmp_path, NODE, shared_memory=tmp_path).attempt(JOB, 1)
    told: list[Fact] = []
    vote = RankVote(
        checkpoint_id=checkpoint_id(JOB, 3, 1),
        step=3,
        shard=ShardFile(rank=0, name="nothing", bytes=1, sha256="0" * 64),
    )

    async def run(pid: int) -> None:
        gang = gang_of(pid, tmp_path, attempt, told.append)
        gang._votes.check(0, vote)
        async with asyncio.timeout(60):
            while not told:  # noqa: ASYNC110 a fact wakes nobody here
                await asyncio.sleep(0.01)

    with capture_logs() as logged, subprocess.Popen(["true"]) as dead:
        asyncio.run(run(dead.pid))
    assert [fact.reason for fact in told if isinstance(fact, CheckpointLost)] == [
        "shard nothing of rank 0: the file is missing"
    ]
    assert logged == []


def test_a_log_that_takes_long_to_empty_holds_up_no_other_gang_and_not_its_own_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may put a file in its place whose pieces the file system frees for a minute."""
    begun, freed = threading.Event(), threading.Event()
    empty = os.ftruncate

    def take_long(descriptor: int, length: int) -> None:
        begun.set()
        freed.wait()
        empty(descriptor, length)

    monkeypatch.setattr(os, "ftruncate", take_long)
    monkeypatch.setattr(gang_logs, "LOOK_EVERY_S", 0.0)
    attempt = NodeFolder(tmp_path, NODE, shared_memory=tmp_path).attempt(JOB, 1)
    attempt.path.mkdir(parents=True)
    log = attempt.log(0, "stdout")

    async def run(pid: int) -> None:
        gang = gang_of(pid, tmp_path, attempt)
        log.write_bytes(b"a line\n")
        os.truncate(log, FILE_BYTES + 1)
        gang.tick()
        begun.wait()
        assert gang.take_records().logs == ()
        assert not gang.drained()
        freed.set()
        async with asyncio.timeout(60):
            while not (lines := gang.take_records().logs):  # noqa: ASYNC110 a file tells nobody
                await asyncio.sleep(0.01)
            assert f"{FILE_BYTES + 1} bytes until here" in lines[0].text
            begun.clear()
            freed.clear()
            os.truncate(log, FILE_BYTES + 1)
            gang.tick()
            begun.wait()
            await gang.sweep("no such mark")
            while not gang.drained():  # noqa: ASYNC110 the same
                await asyncio.sleep(0.01)
        assert not freed.is_set()
        freed.set()

    with subprocess.Popen(["true"]) as dead:
        asyncio.run(run(dead.pid))


def test_a_log_that_takes_long_to_read_holds_up_no_other_gang_and_not_its_own_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On XFS who reads a file waits for who changes it: one call of a rank can take a minute."""
    begun, freed = threading.Event(), threading.Event()

    def take_long(path: Path) -> int:
        begun.set()
        freed.wait()
        return open_plain(path)

    monkeypatch.setattr(log_tail, "open_plain", take_long)
    attempt = NodeFolder(tmp_path, NODE, shared_memory=tmp_path).attempt(JOB, 1)
    attempt.path.mkdir(parents=True)
    attempt.log(0, "stdout").write_bytes(b"a line\n")

    async def run(pid: int) -> None:
        gang = gang_of(pid, tmp_path, attempt)
        assert gang.take_records().logs == ()
        assert begun.is_set()
        assert not gang.drained()
        freed.set()
        while not (lines := gang.take_records().logs):  # noqa: ASYNC110 a file tells nobody
            await asyncio.sleep(0.01)
        assert [line.text for line in lines] == ["a line"]
        assert gang.drained()
        begun.clear()
        freed.clear()
        with attempt.log(0, "stdout").open("ab") as log:
            log.write(b"another line\n")
        assert gang.take_records().logs == ()
        await gang.sweep("no such mark")
        while not gang.drained():  # noqa: ASYNC110 a file tells nobody
            await asyncio.sleep(0.01)
        assert not freed.is_set()
        freed.set()

    with subprocess.Popen(["true"]) as dead:
        asyncio.run(run(dead.pid))


def test_the_threads_of_a_rank_that_looks_dead_are_read_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be ten thousands: a rank whose first thread has ended is dead as far as can be seen."""
    read_in: list[threading.Thread] = []

    def observed(pid: int) -> list[int]:
        read_in.append(threading.current_thread())
        return kill_tracers(pid)

    monkeypatch.setattr(runtime, "kill_tracers", observed)
    monkeypatch.setattr(runtime, "_REAPED_WITHIN_S", 0.0)

    async def run(pid: int) -> None:
        seats = {0: watched(tmp_path)._seats[0]}
        crew = Crew(seats=seats, store=None, pids={0: pid}, pipes={}, boards={})
        folder = NodeFolder(tmp_path, NODE, shared_memory=tmp_path).attempt(JOB, 1)
        gang = GangRuntime(crew, NODE, folder, FolderFiles(tmp_path), lambda _: None)
        while not read_in:
            gang.tick()
            await asyncio.sleep(0)

    with subprocess.Popen(["true"]) as dead:
        until(lambda: is_dying(dead.pid))
        asyncio.run(run(dead.pid))
    assert threading.main_thread() not in read_in


def test_a_gang_ends_though_the_kernel_does_not_let_a_killed_rank_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call to a storage or a device that does not answer holds it; here nobody reaps it."""
    monkeypatch.setattr(runtime, "_REAPED_WITHIN_S", 0.0)
    attempt = NodeFolder(tmp_path, NODE, shared_memory=tmp_path).attempt(JOB, 1)
    attempt.path.mkdir(parents=True)

    async def run(pid: int) -> None:
        gang = gang_of(pid, tmp_path, attempt)
        gang.happen(Condemned("the controller asked for it"))
        async with asyncio.timeout(60):
            while not gang.ended:
                gang.tick()
                await asyncio.sleep(0)
        await gang.sweep("no such mark")
        told = gang.end().exits[0]
        assert told.signal == signal.SIGKILL
        assert (told.error or "").startswith("killed: the controller asked for it; the kernel does")

    with subprocess.Popen(["true"]) as dead:
        until(lambda: is_dying(dead.pid))
        asyncio.run(run(dead.pid))


def test_other_gangs_are_watched_while_what_one_has_left_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes seconds where a rank of any gang has started thousands of processes."""
    begun, found = threading.Event(), threading.Event()

    def look_long(*_: object) -> list[int]:
        begun.set()
        found.wait()
        return []

    monkeypatch.setattr(runtime, "sweep_sessions", look_long)
    told: list[Fact] = []

    async def run() -> None:
        async with forkers(tmp_path) as made, asyncio.timeout(60):
            supervisor = Supervisor(
                NODE,
                made.folder,
                Storage(tmp_path / "checkpoints", NODE),
                cast("NodeCommands", NoNodeCommands()),
                made.launcher,
                told.append,
            )
            watching = asyncio.create_task(supervisor.run(lambda: False))
            await supervisor.handle(launch(1, 1, steps=1))
            lasting = new_job_id(1_700_000_000_000, bytes([1] * 10))
            other = launch(1, 1, FOREVER, pause_s=0.01).model_copy(update={"job_id": lasting})
            await supervisor.handle(other)
            while not begun.is_set():
                await asyncio.sleep(0.01)
                while made.told:
                    supervisor.rank_told(made.told.pop(0))
            supervisor.take_records()
            while not any(records.steps for records in supervisor.take_records()):  # noqa: ASYNC110 nor do records
                await asyncio.sleep(0.01)
            found.set()
            supervisor.condemn_all("the test is over")
            watching.cancel()

    asyncio.run(run())


def test_a_home_that_does_not_answer_holds_up_no_loop_while_ranks_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a directory of a server that is away: whoever asks about a file in it waits."""
    answers = threading.Event()
    asked_in: list[threading.Thread] = []
    attempt = NodeFolder(tmp_path, NODE, shared_memory=tmp_path).attempt(JOB, 1)
    attempt.path.mkdir(parents=True)
    log = attempt.log(0, "stdout")
    log.write_bytes(b"a line\n")

    ask = Path.lstat

    def wait(path: Path) -> os.stat_result:
        if path.parent == attempt.path:
            asked_in.append(threading.current_thread())
            if threading.current_thread() is not threading.main_thread():
                answers.wait()
        return ask(path)

    monkeypatch.setattr(Path, "lstat", wait)

    async def run(pid: int) -> None:
        gang = gang_of(pid, tmp_path, attempt)
        for _ in range(3):
            gang.tick()
            assert gang.take_records().logs == ()
        until(lambda: len(asked_in) > 1)  # to read it, and to start it over
        assert threading.main_thread() not in asked_in
        answers.set()
        async with asyncio.timeout(60):
            while not (lines := gang.take_records().logs):  # noqa: ASYNC110 a file tells nobody
                await asyncio.sleep(0.01)
        assert [line.text for line in lines] == ["a line"]

    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as living:
        try:
            asyncio.run(run(living.pid))
        finally:
            answers.set()
            living.kill()


@pytest.mark.usefixtures("agent")
def test_a_shard_that_is_not_what_its_rank_votes_for_costs_that_checkpoint(
    controller: Controller,
) -> None:
    controller.send(launch(steps=5, digest_of="something else"))
    end = ended(controller)
    assert all(e.finished for e in end.exits)
    assert controller.all_of(CheckpointVoted) == []
    lost = controller.all_of(CheckpointLost)
    assert len(lost) == 2
    assert all("the rank voted for" in fact.reason for fact in lost)
    kinds = [fact.kind for fact in controller.facts()]
    assert kinds[-1] == "gang_ended"
