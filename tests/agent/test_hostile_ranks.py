"""Ranks that do what none of ours does, beside ranks that train, on one node."""

import os
import time
from pathlib import Path

import pytest

from services.contract.messages.commands import PurgeJob, StopGang
from services.contract.messages.facts import (
    CheckpointCorrupt,
    CheckpointLost,
    CheckpointVoted,
    Evaluated,
    GangEnded,
    JobPurged,
)
from services.contract.redis import redis_keys
from services.contract.words.ids import new_job_id
from services.worker.agent.host.folders import NodeFolder
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
from tests.agent.test_metrics import watched
from tests.waiting import until

WORDS = {
    "phase": "rank 1 wrote phase 99 to its board",
    "unit": "rank 1 wrote unit -7 to its board",
    "board cut": "rank 1 made its board 0 bytes long",
    "board grown": "rank 1 made its board 1048576 bytes long",
    "not a message": "rank 1 wrote a line to its pipe that is not a message: Invalid JSON",
    "long line": "rank 1 wrote a line of more than 1048576 bytes to its pipe",
    "endless line": "rank 1 wrote a line of more than 1048576 bytes to its pipe",
    "negative step": "rank 1 wrote a line to its pipe that is not a message: rank_evaluated/step",
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
    "log replaced": "exited with code 7",
}


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
    assert is_gone(int(stranger.read_text()))
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


def test_a_board_that_is_cut_before_its_agent_ever_looked_is_seen_to_be(tmp_path: Path) -> None:
    attempt = NodeFolder(tmp_path, NODE, shared_memory=tmp_path).attempt(JOB, 1)
    boards = attempt.open(launch().plan.ranks)
    assert boards is not None
    os.truncate(attempt.board(0), 0)
    attempt.board(1).unlink()
    os.mkfifo(attempt.board(1))
    telemetry = watched(tmp_path, boards)
    assert telemetry.begun() == {}
    assert telemetry.faults == {0: "made its board 0 bytes long; a board has 65536"}
    assert list(telemetry.marks()) == [1]  # though its name leads elsewhere
    telemetry.close()


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
