"""The storage keeps its promises in a folder and in a bucket: the same cases on both.

The bucket's server is moto's, in a process of its own. Each node has a ``Storage`` of its own; in a bucket with
a folder of copies that no other node sees.
"""

import asyncio
import threading

from services.contract.messages.commands import (
    ExportCheckpoint,
    KeepStanding,
    PurgeJob,
    RetireCheckpoint,
)
from services.contract.messages.facts import (
    ChainDamaged,
    CheckpointCorrupt,
    CheckpointLinked,
    CheckpointLost,
    CheckpointVerified,
    ExportFailed,
)
from services.contract.storage.commit_chain import CommitChain
from services.contract.storage.manifests import Manifest
from services.contract.words.states import JobState
from services.worker.agent.storage.exporter import Exporter
from services.worker.agent.storage.job_storage import purge
from tests.agent.conftest import JOB, launch
from tests.agent.shared_storage.places import CONTENT, NODES, SHARD, Place, commit, verify
from tests.waiting import until


def test_what_one_node_commits_another_one_loads(place: Place) -> None:
    place.on("node-1").open_attempt(launch(1))
    manifest = place.save("node-1", 3)
    assert isinstance(place.on("node-1").commit(commit(manifest)), CheckpointLinked)
    resumed = launch(2).model_copy(update={"resume_from": manifest.checkpoint_id})
    other = place.on("node-2")
    other.open_attempt(resumed)
    # As ranks read: the folder of their node, and nothing else.
    chain = CommitChain(other.root, JOB)
    assert chain.find(manifest.checkpoint_id) == manifest
    assert (chain.shard_folder(manifest.checkpoint_id) / SHARD.name).read_bytes() == CONTENT


def test_a_checkpoint_whose_shard_is_not_there_is_not_committed(place: Place) -> None:
    place.on("node-1").open_attempt(launch(1))
    manifest = place.save("node-1", 3).model_copy(
        update={"shards": (SHARD, SHARD.model_copy(update={"rank": 1, "name": "rank-1.bin"}))}
    )
    assert isinstance(place.on("node-1").commit(commit(manifest)), CheckpointLost)
    assert place.committed("node-2") == []


def test_two_nodes_that_commit_at_once_both_stand_in_the_chain_and_one_record_once(
    place: Place,
) -> None:
    place.on("node-1").open_attempt(launch(1))
    first, second = place.save("node-1", 1), place.save("node-2", 2)
    told: list[object] = []

    def run(node: str, manifest: Manifest) -> None:
        told.append(place.on(node).commit(commit(manifest)))

    threads = [threading.Thread(target=run, args=(n, m)) for n in NODES for m in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = {
        (fact.number, fact.manifest.step) for fact in told if isinstance(fact, CheckpointLinked)
    }
    assert len(told) == 4
    assert sorted(number for number, _ in numbers) == [2, 3]
    assert sorted(place.committed("node-1")) == sorted(place.committed("node-2")) == [1, 2]


def test_an_overtaken_attempt_commits_nothing_and_what_it_wrote_goes(place: Place) -> None:
    place.on("node-1").open_attempt(launch(1))
    late = place.save("node-1", 3)
    place.on("node-2").open_attempt(launch(2))
    fact = place.on("node-1").commit(commit(late))
    assert isinstance(fact, CheckpointLost)
    assert place.committed("node-1") == []
    until(lambda: not {name for name in place.names() if name.startswith("shards")})


def test_a_damaged_shard_is_found_and_a_damaged_record_is_passed_over(place: Place) -> None:
    storage = place.on("node-1")
    storage.open_attempt(launch(1))
    good, bad, lost = (place.save("node-1", step) for step in (1, 2, 3))
    for manifest in (good, bad, lost):
        storage.commit(commit(manifest))
    shard = f"shards/{bad.checkpoint_id}/{SHARD.name}"
    place.damage(shard, CONTENT[::-1])
    place.damage("chain/00000004.json", b"{")
    other = place.on("node-2")
    assert isinstance(other.verify(verify(good))[-1], CheckpointVerified)
    found = other.verify(verify(bad))[-1]
    assert isinstance(found, CheckpointCorrupt)
    assert (found.file, "sha256" in found.reason) == (shard, True)
    assert place.committed("node-2") == [1, 2]
    (damage,) = other.open_attempt(launch(2))
    assert isinstance(damage, ChainDamaged)
    assert [record.name for record in damage.records] == ["00000004.json"]


def test_a_rank_that_loads_a_damaged_shard_finds_it_damaged(place: Place) -> None:
    place.on("node-1").open_attempt(launch(1))
    manifest = place.save("node-1", 1)
    place.on("node-1").commit(commit(manifest))
    place.damage(f"shards/{manifest.checkpoint_id}/{SHARD.name}", b"something else")
    resumed = launch(2).model_copy(update={"resume_from": manifest.checkpoint_id})
    place.on("node-2").open_attempt(resumed)
    folder = CommitChain(place.on("node-2").root, JOB).shard_folder(manifest.checkpoint_id)
    assert (folder / SHARD.name).read_bytes() == b"something else"


def test_retention_removes_for_all_nodes_what_it_retires(place: Place) -> None:
    storage = place.on("node-1")
    storage.open_attempt(launch(1))
    old, new = place.save("node-1", 1), place.save("node-1", 2)
    for manifest in (old, new):
        storage.commit(commit(manifest))
    retired = RetireCheckpoint(job_id=JOB, fence=1, checkpoint_id=old.checkpoint_id)
    for node in NODES:  # given again it changes nothing
        place.on(node).retire(retired)
    assert place.committed("node-2") == [2]
    shards = {name for name in place.names() if name.startswith("shards")}
    assert shards == {f"shards/{new.checkpoint_id}/{SHARD.name}"}


def test_a_node_that_never_saw_a_job_finds_it_again_as_it_stood(place: Place) -> None:
    place.on("node-1").open_attempt(launch(1))
    manifest = place.save("node-1", 3)
    place.on("node-1").commit(commit(manifest))
    stands = KeepStanding(job_id=JOB, fence=1, standing=JobState.PAUSED, reason="a person")
    place.on("node-1").keep_standing(stands)
    assert place.on("node-2").files.jobs() == [JOB]
    (found,) = place.on("node-2").find_job(JOB, None, 0)
    assert (found.fence, found.card.standing) == (1, JobState.PAUSED)
    assert [each.step for each in found.manifests.values()] == [3]


def test_a_deleted_job_is_not_found_and_a_purged_one_leaves_nothing(place: Place) -> None:
    place.on("node-1").open_attempt(launch(1))
    manifest = place.save("node-1", 3)
    place.on("node-1").commit(commit(manifest))
    assert place.on("node-2").put_card_away(JOB)
    assert not place.on("node-1").put_card_away(JOB)
    assert place.on("node-1").find_job(JOB, None, 0) == ()
    for node in NODES:
        assert purge(place.on(node), PurgeJob(job_id=JOB, fence=1), node).error is None
    assert place.names() == set()
    for node in NODES:
        assert place.on(node).files.jobs() == []
    assert place.committed("node-1") == []


def test_all_nodes_name_one_storage_alike(place: Place) -> None:
    names = [place.on(node).files.identity() for node in NODES]
    assert names[0] is not None
    assert names[0] == names[1]
    assert [place.on(node).files.fault() for node in NODES] == [None, None]


def test_an_export_of_what_the_bucket_lacks_fails_with_the_reason(place: Place) -> None:
    storage = place.on("node-1")
    storage.open_attempt(launch(1))
    manifest = place.save("node-1", 3)
    storage.commit(commit(manifest))
    command = ExportCheckpoint(job_id=JOB, fence=1, checkpoint_id=manifest.checkpoint_id)
    facts = asyncio.run(Exporter(storage, "node-1", {}).export(command))
    assert isinstance(facts[-1], ExportFailed)  # its shard is no safetensors file
    assert not {name for name in place.names() if name.startswith("exports")}
