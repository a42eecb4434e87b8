"""An agent's rounds through storage, with a real Redis that knows some jobs and not others."""

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import redis
from redis.asyncio import Redis as AsyncRedis

from services.contract.jobs.traces import draft as unfinished_trace
from services.contract.jobs.traces import raw_draft, trace_file
from services.contract.messages.commands import CommitCheckpoint
from services.contract.messages.facts import Fact, GangEnded, JobFound, RunningGang
from services.contract.redis import redis_keys
from services.contract.storage.commit_chain import CommitChain
from services.contract.storage.job_cards import DELETED, read_card
from services.contract.storage.manifests import Manifest, ShardFile
from services.contract.words.ids import checkpoint_id, new_job_id, new_trace_id
from services.worker.agent.host.folders import ATTEMPTS_KEPT, NodeFolder
from services.worker.agent.host.removal import remove_tree
from services.worker.agent.storage import rounds as storage_rounds
from services.worker.agent.storage import shared_files
from services.worker.agent.storage.job_storage import Storage
from services.worker.agent.storage.rounds import Holdings, StorageRounds
from services.worker.agent.streams.redis_clients import writing_client
from tests.agent.conftest import JOB, NODE, launch
from tests.agent.test_removal import make_deep
from tests.waiting import until

pytestmark = pytest.mark.redis

Gangs = Mapping[str, tuple[RunningGang, int]]


class Rounds:
    """An agent's rounds on a storage that holds one job with a committed checkpoint."""

    def __init__(self, root: Path, url: str) -> None:
        self.storage = Storage(root / "checkpoints", NODE)
        self.folder = NodeFolder(root / "home", NODE)
        self.told: list[Fact] = []
        self._url = url
        self.storage.open_attempt(launch(1))
        self.storage.open_attempt(launch(2))
        self.folder_of(10, 2)
        shard = ShardFile(rank=0, name="rank-0.bin", bytes=1, sha256="0" * 64)
        self.manifest = Manifest(
            job_id=JOB,
            checkpoint_id=checkpoint_id(JOB, 10, 2),
            fence=2,
            step=10,
            world_size=1,
            shards=(shard,),
        )
        self.storage.commit(CommitCheckpoint(job_id=JOB, fence=2, manifest=self.manifest))

    def folder_of(self, step: int, fence: int) -> Path:
        chain = CommitChain(self.storage.root, JOB)
        folder = chain.shard_folder(checkpoint_id(JOB, step, fence))
        folder.mkdir(parents=True)
        (folder / "rank-0.bin").write_bytes(b"x")
        return folder

    def agent(
        self, client: AsyncRedis, node_id: str = NODE, tell: Callable[[Fact], None] | None = None
    ) -> StorageRounds:
        """A life of an agent that runs nothing."""
        holdings = Holdings(node_id, self.storage, self.folder, dict)
        return StorageRounds(client, holdings, tell or self.told.append, grace_s=0.0)

    def go(self, gangs: Gangs | None = None, *, grace_s: float = 0.0, times: int = 1) -> bool:
        """Whether the last round is soon followed by another one."""

        async def rounds() -> bool:
            async with writing_client(self._url) as client:
                holdings = Holdings(NODE, self.storage, self.folder, lambda: gangs or {})
                agent = StorageRounds(client, holdings, self.told.append, grace_s=grace_s)
                return [await agent.go() for _ in range(times)][-1]

        return asyncio.run(rounds())


@pytest.fixture
def rounds(tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Rounds:
    # On a machine that is slow at it, too, removals end within a round.
    monkeypatch.setattr(storage_rounds, "REMOVED_WITHIN_S", 60.0)
    return Rounds(tmp_path, redis_url)


@pytest.fixture
def client(redis_url: str) -> "redis.Redis":
    return redis.Redis.from_url(redis_url, decode_responses=True)


def test_a_job_that_redis_does_not_know_is_told_with_all_that_its_chain_commits(
    rounds: Rounds,
) -> None:
    rounds.go()
    (fact,) = rounds.told
    assert isinstance(fact, JobFound)
    assert (fact.fence, fact.manifests) == (2, {3: rounds.manifest})
    assert fact.card.spec == launch().spec
    assert not fact.is_running


def test_only_the_newest_attempts_ranks_are_told_as_running(rounds: Rounds) -> None:
    for fence, is_running in ((1, False), (2, True)):
        rounds.told.clear()
        gang = RunningGang(job_id=JOB, fence=fence, ranks=(0,))
        rounds.go({JOB: (gang, 17)})
        (fact,) = rounds.told
        assert isinstance(fact, JobFound)
        assert (fact.is_running, fact.last_step) == (is_running, 17 if is_running else 0)


def test_a_job_whose_record_is_of_another_type_is_not_lost_and_hides_no_lost_one(
    rounds: Rounds, client: "redis.Redis"
) -> None:
    other = new_job_id(1_700_000_000_000, bytes([1] * 10))
    rounds.storage.open_attempt(launch(1).model_copy(update={"job_id": other}))
    client.rpush(redis_keys.job(other), "x")
    rounds.go()
    assert [fact.job_id for fact in rounds.told if isinstance(fact, JobFound)] == [JOB]


def test_a_known_job_is_not_told(rounds: Rounds, client: "redis.Redis") -> None:
    client.hset(redis_keys.job(JOB), "state", "RUNNING")
    rounds.go()
    assert rounds.told == []


def test_a_deleted_job_is_never_found_again_even_if_redis_forgets_that(
    rounds: Rounds, client: "redis.Redis"
) -> None:
    client.sadd(redis_keys.DELETED_JOBS, JOB)
    rounds.go()
    client.flushdb()
    rounds.go()
    assert rounds.told == []
    assert read_card(rounds.storage.root, JOB) is None
    assert CommitChain(rounds.storage.root, JOB).committed() == [rounds.manifest]


def test_a_job_that_stands_although_its_ranks_train_is_told_until_they_are_adopted(
    rounds: Rounds, client: "redis.Redis"
) -> None:
    gangs = {JOB: (RunningGang(job_id=JOB, fence=2, ranks=(0,)), 17)}
    assert rounds.go(gangs), "Redis knows nothing of it, and its nodes may not all have joined"
    for told, state in enumerate(("PAUSED", "QUEUED"), start=2):
        client.hset(redis_keys.job(JOB), "state", state)
        assert not rounds.go()
        assert rounds.go(gangs)
        assert [type(fact) for fact in rounds.told] == [JobFound] * told


def test_orphans_go_once_they_were_of_no_use_for_long_and_what_is_named_stays(
    rounds: Rounds, client: "redis.Redis"
) -> None:
    overtaken, own = rounds.folder_of(7, 1), rounds.folder_of(20, 2)
    passed_over = rounds.folder_of(9, 2)
    make_deep(overtaken)
    draft = rounds.storage.root / JOB / "chain" / ".draft-of-the-dead"
    draft.write_bytes(b"half")
    traced = trace_file(rounds.storage.root, JOB, new_trace_id(1, bytes(10)), 0)
    traced.parent.mkdir(parents=True)
    for path in (traced, unfinished_trace(traced), raw_draft(traced)):
        path.write_bytes(b"{")
    client.hset(redis_keys.job(JOB), "state", "RUNNING")
    rounds.go(grace_s=900, times=2)
    left = (overtaken, passed_over, own, draft, raw_draft(traced))
    assert all(path.exists() for path in left)
    rounds.go()
    assert list(traced.parent.iterdir()) == [traced]
    assert not overtaken.exists()
    assert not passed_over.exists(), "its attempt has committed a later one"
    assert not draft.exists()
    assert own.exists(), "its attempt may still commit it"
    client.hset(redis_keys.job(JOB), "state", "FAILED")
    rounds.go({JOB: (RunningGang(job_id=JOB, fence=2, ranks=(0,)), 1)})
    assert own.exists(), "ranks of it live here"
    rounds.go()
    assert not own.exists()
    chain = CommitChain(rounds.storage.root, JOB)
    assert chain.shard_folder(rounds.manifest.checkpoint_id).exists()


def test_a_removal_that_takes_long_keeps_no_lost_job_from_being_told(
    rounds: Rounds, client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round waited for removals, which ranks can have take minutes, and found no lost job meanwhile."""
    released, begun = threading.Event(), []

    def take_long(folder: Path) -> None:
        begun.append(folder)
        released.wait()
        remove_tree(folder)

    left = [rounds.folder_of(step, 1) for step in (20, 30)]
    rounds.folder.attempt(JOB, 2).path.mkdir(parents=True)
    client.hset(redis_keys.job(JOB), "state", "RUNNING")
    monkeypatch.setattr(shared_files, "remove_tree", take_long)
    monkeypatch.setattr(storage_rounds, "REMOVED_WITHIN_S", 0.0)

    async def go() -> None:
        async with asyncio.timeout(30), writing_client(rounds._url) as redis_client:
            agent = rounds.agent(redis_client)
            await agent.go()
            assert not rounds.told
            client.delete(redis_keys.job(JOB))
            await agent.go()
        assert isinstance(rounds.told[0], JobFound)

    try:
        asyncio.run(go())
        until(lambda: begun)
        assert begun == left[:1]
    finally:
        released.set()
    until(lambda: not any(folder.exists() for folder in left))


def test_files_of_old_attempts_are_pruned_and_those_of_deleted_jobs(
    rounds: Rounds, client: "redis.Redis"
) -> None:
    client.hset(redis_keys.job(JOB), "state", "RUNNING")
    fences = range(1, ATTEMPTS_KEPT + 6)
    for fence in fences:
        attempt = rounds.folder.attempt(JOB, fence)
        attempt.open(())
        if fence != 2:
            attempt.close(
                GangEnded(job_id=JOB, fence=fence, node_id=NODE, exits=(), last_step=fence)
            )
    rounds.go()
    kept = {f for f in fences if rounds.folder.attempt(JOB, f).path.exists()}
    assert kept == {2, *range(6, ATTEMPTS_KEPT + 6)}, "one that has not ended stays"
    client.delete(redis_keys.job(JOB))
    client.sadd(redis_keys.DELETED_JOBS, JOB)
    rounds.go()
    assert {f for f in fences if rounds.folder.attempt(JOB, f).path.exists()} == {2}
    rounds.folder.remove_boards()


def test_only_the_first_round_goes_through_jobs_that_had_no_ranks_here_while_none_is_lost(
    rounds: Rounds, redis_url: str, client: "redis.Redis"
) -> None:
    client.hset(redis_keys.job(JOB), "state", "RUNNING")
    overtaken = rounds.folder_of(7, 1)

    async def three_rounds() -> None:
        async with writing_client(redis_url) as connection:
            agent = rounds.agent(connection)
            await agent.go()
            assert not overtaken.exists()
            rounds.folder_of(7, 1)
            client.delete(redis_keys.job(JOB))
            await agent.go()
            assert rounds.told == []
            assert overtaken.exists()
            # Once ranks of it were launched here it is among those to look after.
            rounds.folder.attempt(JOB, 2).path.mkdir(parents=True)
            await agent.go()
            assert [type(fact) for fact in rounds.told] == [JobFound]
            assert not overtaken.exists()

    asyncio.run(three_rounds())


def test_all_jobs_are_gone_through_when_redis_may_have_lost_some_and_until_none_is_lost(
    rounds: Rounds, redis_url: str, client: "redis.Redis"
) -> None:
    client.hset(redis_keys.job(JOB), "state", "RUNNING")
    asked, heard = asyncio.Event(), asyncio.Event()

    def tell(fact: Fact) -> None:
        rounds.told.append(fact)
        heard.set()

    async def asked_round() -> None:
        async with writing_client(redis_url) as connection:
            agent = rounds.agent(connection, tell=tell)
            await agent.go()
            client.delete(redis_keys.job(JOB))
            asked.set()
            running = asyncio.create_task(agent.run(asked))
            async with asyncio.timeout(60):
                await heard.wait()
            running.cancel()
            await asyncio.wait([running])
            await agent.go()
            assert [type(fact) for fact in rounds.told] == [JobFound, JobFound]
            client.hset(redis_keys.job(JOB), "state", "RUNNING")
            await agent.go()
            client.delete(redis_keys.job(JOB))
            await agent.go()
            assert len(rounds.told) == 2

    asyncio.run(asked_round())


def test_a_lost_job_of_other_nodes_is_left_to_them_for_some_seconds(
    rounds: Rounds, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go_elsewhere() -> None:
        async with writing_client(redis_url) as connection:
            agent = rounds.agent(connection, "another-node")
            await agent.go()
            assert rounds.told == []
            monkeypatch.setattr("services.worker.agent.storage.rounds.OTHERS_AFTER_S", 0.0)
            await agent.go()
            assert [type(fact) for fact in rounds.told] == [JobFound]

    asyncio.run(go_elsewhere())


def test_a_folder_whose_name_is_no_text_ends_no_round(rounds: Rounds) -> None:
    os.mkdir(os.fsencode(rounds.storage.root) + b"/job_\xff")  # noqa: PTH102 such a name
    rounds.go()
    assert [fact.job_id for fact in rounds.told if isinstance(fact, JobFound)] == [JOB]


def test_what_a_rank_puts_into_its_job_s_folder_hides_no_other_lost_job(
    rounds: Rounds, client: "redis.Redis"
) -> None:
    deleted, lost = (new_job_id(1_600_000_000_000, bytes([number] * 10)) for number in (1, 2))
    for job_id in (deleted, lost):  # they come before ``JOB``
        rounds.storage.open_attempt(launch().model_copy(update={"job_id": job_id}))
    client.sadd(redis_keys.DELETED_JOBS, deleted)
    (rounds.storage.root / deleted / DELETED).mkdir()
    (rounds.storage.root / lost / "chain" / f"opened-{'9' * 200}").touch()
    rounds.go()
    told = {fact.job_id: fact.fence for fact in rounds.told if isinstance(fact, JobFound)}
    assert told == {lost: 1, JOB: 2}
