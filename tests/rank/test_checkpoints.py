"""Checkpoints: written by every rank, resumed exactly, refused when they are not what they were."""

import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from services.contract.jobs.plans import GangPlan, RankPlacement
from services.contract.jobs.specs import JobSpec
from services.contract.messages.rank_pipe import (
    RankCheckpointBegan,
    RankCheckpointFailed,
    RankFailed,
    RankFinished,
    RankFoundCorrupt,
    RankMessage,
    RankSeat,
    RankVote,
)
from services.contract.storage.commit_chain import CommitChain
from services.contract.storage.manifests import AttemptOpened, Manifest
from services.contract.words.ids import checkpoint_id
from services.worker.agent.storage.export import FILE_BYTES, export
from services.worker.rank.checkpoints import shard_file
from services.worker.rank.checkpoints.loading import source_of
from services.worker.rank.checkpoints.state import TrainingState
from services.worker.rank.checkpoints.writer import CheckpointWriteError, CheckpointWriter
from tests.rank import older_trainer
from tests.rank.gang import JOB, Ranks, Trained
from tests.waiting import until

Spec = Callable[..., JobSpec]

NOISY = {"factory": "tests.rank.user_models:Noisy", "args": {}}


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_resumed_run_has_the_losses_of_the_uninterrupted_one_bit_for_bit(
    trained: Trained, ranks: Ranks, spec: Spec, mode: str
) -> None:
    job = spec(checkpoint={"mode": mode})
    source = trained.committed(3, ranks, job).checkpoint_id
    resumed = ranks.start(job, fence=2, resume_from=source).succeeded()
    assert resumed.losses() == trained.of(job).losses_after(3)
    assert sorted(resumed.losses()) == [4, 5, 6]
    assert [vote.step for vote in resumed.of_kind(0, RankVote)] == [6]


@pytest.mark.ranks
def test_every_random_state_is_resumed(trained: Trained, ranks: Ranks, spec: Spec) -> None:
    job = spec(model=NOISY)
    source = trained.committed(3, ranks, job, units=()).checkpoint_id
    resumed = ranks.start(job, fence=2, resume_from=source, units=()).succeeded()
    assert resumed.losses() == trained.of(job, units=()).losses_after(3)


@pytest.mark.ranks
def test_a_model_is_told_that_it_was_loaded(trained: Trained, ranks: Ranks, spec: Spec) -> None:
    job = spec(model={"factory": "tests.rank.user_models:Counting", "args": {}})
    source = trained.committed(3, ranks, job, units=()).checkpoint_id
    resumed = ranks.start(job, fence=2, resume_from=source, units=()).succeeded()
    assert resumed.losses() == trained.of(job, units=()).losses_after(3)


@pytest.mark.ranks
def test_a_module_that_is_set_to_evaluate_stays_so_after_an_evaluation(
    trained: Trained, ranks: Ranks, spec: Spec
) -> None:
    frozen = {"factory": "tests.rank.user_models:PartlyFrozen", "args": {}}
    job = spec(model=frozen, train={"eval_every": 2})
    whole = trained.of(job, units=())
    source = trained.committed(3, ranks, job, units=()).checkpoint_id
    resumed = ranks.start(job, fence=2, resume_from=source, units=()).succeeded()
    assert resumed.losses() == whole.losses_after(3)
    assert whole.losses() == trained.of(spec(model=frozen), units=()).losses()


@pytest.mark.ranks
def test_a_run_that_starts_over_draws_the_same_random_numbers(
    trained: Trained, ranks: Ranks, spec: Spec
) -> None:
    again = ranks.start(spec(model=NOISY), units=()).succeeded()
    assert again.losses() == trained.of(spec(model=NOISY), units=()).losses()


@pytest.mark.ranks
@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (2, 3), (1, 2), (4, 2)])
def test_a_run_resumes_at_another_world_size_with_optimizer_and_data_position(
    trained: Trained, ranks: Ranks, spec: Spec, saved: int, loaded: int
) -> None:
    source = trained.committed(3, ranks, spec(), saved).checkpoint_id
    resumed = ranks.start(spec(), loaded, fence=2, resume_from=source).succeeded()
    assert sorted(resumed.losses()) == [4, 5, 6]
    whole = trained.of(spec(), saved)
    assert resumed.losses() == pytest.approx(whole.losses_after(3), abs=1e-5)


@pytest.mark.ranks
def test_the_first_values_do_not_depend_on_the_number_of_ranks(ranks: Ranks, spec: Spec) -> None:
    # Without a learning rate, the state after a step is the state before it.
    job = spec(
        train={"steps": 1},
        optimizer={"factory": "sgd", "args": {"lr": 0}},
        schedule={"factory": "constant", "args": {}},
    )
    for fence, world in enumerate((1, 2, 3), start=1):
        ranks.start(job, world, fence=fence).succeeded().committed(1)
    chain = CommitChain(ranks.root, JOB)
    one, *others = (whole_model(chain, manifest) for manifest in chain.committed())
    assert len(one) == 21
    for other in others:
        assert other.keys() == one.keys()
        assert all(torch.equal(other[name], tensor) for name, tensor in one.items())
    for manifest in chain.committed():
        export(ranks.root, JOB, manifest.checkpoint_id, FILE_BYTES)
        path = ranks.root / JOB / "exports" / manifest.checkpoint_id / "model.safetensors"
        exported = load_file(path)
        assert {f"model.{name}" for name in exported} == one.keys()
        assert all(torch.equal(exported[name.removeprefix("model.")], one[name]) for name in one)


def whole_model(chain: CommitChain, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The model's tensors, put together from the slices along dim 0 of every rank."""
    folder = chain.shard_folder(manifest.checkpoint_id)
    pieces: dict[str, list[torch.Tensor]] = {}
    for shard in manifest.shards:
        with safe_open(folder / shard.name, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping: safetensors' handle)
                if name.startswith("model."):
                    pieces.setdefault(name, []).append(file.get_tensor(name))
    return {name: torch.cat(parts) for name, parts in pieces.items()}


@pytest.mark.ranks
def test_a_finished_run_that_is_resumed_changes_nothing(
    trained: Trained, ranks: Ranks, spec: Spec
) -> None:
    manifest = trained.committed(6, ranks, spec())
    again = ranks.start(spec(), fence=2, resume_from=manifest.checkpoint_id).succeeded()
    assert again.losses() == {}
    assert again.of_kind(0, RankVote) == []
    assert again.of_kind(0, RankFinished) == [RankFinished(step=6, drained=False)]


@pytest.mark.ranks
@pytest.mark.parametrize("place", ["header", "values"])
def test_a_corrupt_shard_is_refused_by_name_and_digest(
    trained: Trained, ranks: Ranks, spec: Spec, place: str
) -> None:
    manifest = trained.committed(3, ranks, spec())
    folder = CommitChain(ranks.root, JOB).shard_folder(manifest.checkpoint_id)
    path = folder / manifest.shards[1].name
    content = bytearray(path.read_bytes())
    content[60 if place == "header" else -5] ^= 1
    path.write_bytes(content)
    resumed = ranks.start(spec(), fence=2, resume_from=manifest.checkpoint_id)
    assert resumed.ended() == [1, 1]
    reasons = [failure.error for failure in resumed.of_kind(1, RankFailed)]
    assert len(reasons) == 1
    assert "CorruptShardError" in reasons[0]
    assert path.name in reasons[0]
    assert manifest.shards[1].sha256 in reasons[0]


@pytest.mark.ranks
def test_a_damaged_file_that_nobody_takes_for_ones_own_is_refused(ranks: Ranks, spec: Spec) -> None:
    """A replica loads its tensors from others' files; without its own it drew other random numbers, unnoticed."""
    job = spec(mesh={"dp_replicate": 2}, resources={"ranks": 2}, model=NOISY)
    manifest = ranks.start(job).succeeded().committed(3)
    path = CommitChain(ranks.root, JOB).shard_folder(manifest.checkpoint_id)
    path /= manifest.shards[1].name
    content = path.read_bytes()
    said = b'\\"rank\\": 1,'
    assert content.count(said) == 1
    path.write_bytes(content.replace(said, said.replace(b"1", b"5")))  # one bit
    resumed = ranks.start(job, fence=2, resume_from=manifest.checkpoint_id)
    assert resumed.ended() == [1, 1]
    (failure,) = resumed.of_kind(1, RankFailed)
    assert "CorruptShardError" in failure.error
    assert manifest.shards[1].sha256 in failure.error
    assert [told.file for told in resumed.of_kind(1, RankFoundCorrupt)] == [
        f"shards/{manifest.checkpoint_id}/{path.name}"
    ]


@pytest.mark.ranks
def test_other_data_than_the_checkpoints_is_refused(
    trained: Trained, ranks: Ranks, spec: Spec, tmp_path: Path
) -> None:
    manifest = trained.committed(3, ranks, spec(), 1)
    other = tmp_path / "other"
    other.mkdir()
    for name in ("a.py", "b.py"):
        (other / name).write_text("pass\n" * 100, encoding="utf-8")
    args = {"seq_len": 16, "library": str(other)}
    data = {"factory": "stdlib_bytes", "args": args}
    resumed = ranks.start(spec(data=data), 1, fence=2, resume_from=manifest.checkpoint_id)
    assert resumed.ended() == [1]
    assert "DataMismatchError" in resumed.of_kind(0, RankFailed)[0].error


@pytest.mark.ranks
def test_a_checkpoint_that_was_never_committed_is_not_resumed(ranks: Ranks, spec: Spec) -> None:
    votes = ranks.start(spec(), 1).succeeded().of_kind(0, RankVote)
    CommitChain(ranks.root, JOB).append(AttemptOpened(job_id=JOB, fence=2))
    resumed = ranks.start(spec(), 1, fence=2, resume_from=votes[0].checkpoint_id)
    assert resumed.ended() == [1]
    assert "is not committed" in resumed.of_kind(0, RankFailed)[0].error


def test_a_storage_that_was_unmounted_is_waited_for_and_makes_no_checkpoint_corrupt(
    tmp_path: Path, spec: Spec, capfd: pytest.CaptureFixture[str]
) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    elsewhere.mkdir()
    name = checkpoint_id(JOB, 3, 1)
    saved = Manifest(
        job_id=JOB, checkpoint_id=name, fence=1, step=3, world_size=1, loss=0.5, shards=()
    )
    CommitChain(elsewhere, JOB).append(saved)
    root.mkdir()  # the folder below the mount
    told: list[RankMessage] = []
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(source_of, seat_of(root, spec()), name, told.append)
        until(lambda: "is it mounted?" in capfd.readouterr().err)
        root.rmdir()
        elsewhere.rename(root)
        assert found.result(60) == saved
    assert told == []


@pytest.mark.ranks
def test_a_failed_write_is_told_and_training_goes_on_until_the_last(
    ranks: Ranks, spec: Spec
) -> None:
    # A file where the folder of all shards must be: whatever the user, nothing can be written.
    (ranks.root / JOB).mkdir()
    (ranks.root / JOB / "shards").write_text("in the way", encoding="utf-8")
    attempt = ranks.start(spec())
    assert attempt.ended() == [1, 1]
    assert sorted(attempt.losses()) == [1, 2, 3, 4, 5, 6]
    for rank in (0, 1):
        began = [message.step for message in attempt.of_kind(rank, RankCheckpointBegan)]
        assert began == [3, 6]
        assert len(attempt.of_kind(rank, RankCheckpointFailed)) == 2
        assert "CheckpointWriteError" in attempt.of_kind(rank, RankFailed)[0].error
        assert attempt.of_kind(rank, RankFinished) == []


def seat_of(root: Path, spec: JobSpec) -> RankSeat:
    place = RankPlacement(rank=0, node_id="here", local_rank=0, device="cpu")
    plan = GangPlan.model_validate(
        {"device_type": "cpu", "sharding": {"mesh": {}}, "ranks": [place.model_dump()]}
    )
    return RankSeat(
        job_id=JOB,
        fence=1,
        rank=0,
        local_rank=0,
        device="cpu",
        spec=spec,
        plan=plan,
        storage_root=str(root),
        board_path="",
        log_folder="",
        store_host="127.0.0.1",
        store_port=1,
        threads=1,
    )


def state_of(values: torch.Tensor, step: int = 1) -> TrainingState:
    return TrainingState(step, 0.5, {"w": values}, {"note": json.dumps("text")})


def test_an_async_checkpoint_holds_the_state_of_its_step_while_training_goes_on(
    tmp_path: Path, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    write = shard_file.write

    def held_up(
        folder: Path,
        rank: int,
        tensors: Mapping[str, torch.Tensor],
        text: Mapping[str, str],
        go_on: Callable[[], None],
    ) -> object:
        assert may_write.wait(120)
        return write(folder, rank, tensors, text, go_on)

    monkeypatch.setattr(shard_file, "write", held_up)
    told: list[RankMessage] = []
    writer = CheckpointWriter(
        seat_of(tmp_path, spec()), told.append, "async", data_digest="d", resumed_step=0
    )
    values = torch.zeros(4)
    writer.save(state_of(values))
    values += 1  # the next step, while the checkpoint is still to be written
    assert [type(message) for message in told] == [RankCheckpointBegan]
    assert not writer.is_due(1)
    may_write.set()
    writer.finish(1)
    vote = told[1]
    assert isinstance(vote, RankVote)
    assert vote.loss == 0.5
    folder = CommitChain(tmp_path, JOB).shard_folder(vote.checkpoint_id)
    with safe_open(folder / vote.shard.name, framework="pt") as file:
        assert file.get_tensor("w").tolist() == [0, 0, 0, 0]
        assert file.metadata() == {"note": '"text"'}


def test_a_full_disk_is_told_and_only_the_last_failure_is_an_error(
    tmp_path: Path, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    told: list[RankMessage] = []
    writer = CheckpointWriter(
        seat_of(tmp_path, spec()), told.append, "sync", data_digest="d", resumed_step=0
    )
    with monkeypatch.context() as patched:
        patched.setattr(shard_file, "write", full)
        writer.save(state_of(torch.zeros(4), step=1))
    failure = told[1]
    assert isinstance(failure, RankCheckpointFailed)
    assert "No space left on device" in failure.reason
    with pytest.raises(CheckpointWriteError, match="after step 1"):
        writer.finish(1)
    writer.finish(2)  # a run that is stopped later, without a checkpoint, is not at fault
    writer.save(state_of(torch.zeros(4), step=2))
    writer.finish(2)
    assert isinstance(told[-1], RankVote)


def test_a_shard_file_is_read_by_the_library_as_it_was_written(tmp_path: Path) -> None:
    tensors = {
        "matrix": torch.randn(3, 5),
        "half": torch.randn(7).to(torch.bfloat16),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "random": torch.get_rng_state(),
        "flag": torch.tensor([True, False]),
        "transposed": torch.arange(6).view(2, 3).t(),
    }
    folder = tmp_path / "shards"
    shard = shard_file.write(folder, 3, tensors, {"about": "ö"})
    assert shard.name == "rank-00003.safetensors"
    assert shard.bytes == (folder / shard.name).stat().st_size
    shard_file.verify(folder, shard)
    with shard_file.opened(folder, shard) as reader:
        assert reader.metadata == {"about": "ö"}
        for name, tensor in tensors.items():
            assert torch.equal(reader.tensor(name), tensor)
        rows = reader.part("matrix", (slice(1, 3), slice(0, 5)))
        assert torch.equal(rows, tensors["matrix"][1:3])
    assert [path.name for path in folder.iterdir()] == [shard.name]


def test_a_dtype_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(shard_file.UnsavableTensorError, match="complex64"):
        shard_file.write(tmp_path, 0, {"z": torch.zeros(2, dtype=torch.complex64)}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_shard_is_durable_with_each_folder_that_was_made_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").resolve())
    )
    root = tmp_path / "storage"
    folder = CommitChain(root, JOB).shard_folder("ckpt")
    shard_file.write(folder, 0, {"weight": torch.zeros(1)}, {})
    (file,) = (path for path in synced if path not in folder.parents and path != folder)
    assert file.name == ".rank-00000.safetensors.partial"
    assert {*synced} == {file, folder, folder.parent, root / JOB, root, tmp_path}
    assert synced[-1] == folder, "a name is durable after what it is put in"


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["Lookahead", "Averaging"])
def test_an_optimizer_of_ones_own_goes_on_where_it_was(
    trained: Trained, ranks: Ranks, spec: Spec, name: str
) -> None:
    factory = f"tests.rank.user_optimizers:{name}"
    job = spec(
        optimizer={"factory": factory, "args": {"lr": 0.05}},
        train={"steps": 8},
        checkpoint={"every_steps": 4},
    )
    source = trained.committed(4, ranks, job).checkpoint_id
    resumed = ranks.start(job, fence=2, resume_from=source).succeeded()
    assert resumed.losses() == trained.of(job).losses_after(4)
    elsewhere = ranks.start(job, 3, fence=3, resume_from=source).succeeded()
    assert elsewhere.losses() == pytest.approx(trained.of(job).losses_after(4), abs=1e-5)


@pytest.mark.ranks
def test_what_each_rank_has_of_its_own_goes_on_where_it_was(
    trained: Trained, ranks: Ranks, spec: Spec
) -> None:
    model = {"factory": "tests.rank.user_models:Centred", "args": {}}
    wanted = {"train": {"eval_every": 3}, "model": model}
    job = spec(**wanted)
    source = trained.committed(3, ranks, job, units=()).checkpoint_id
    resumed = ranks.start(job, fence=2, resume_from=source, units=()).succeeded()
    whole = trained.of(job, units=())
    assert resumed.losses() == whole.losses_after(3)
    ends = [attempt.of_kind(0, RankVote)[-1].evaluation for attempt in (whole, resumed)]
    assert ends[0] == ends[1]
    # Elsewhere all go on with what rank 0 had.
    ranks.start(job, 3, fence=3, resume_from=source, units=()).succeeded()


@pytest.mark.ranks
def test_a_model_that_no_checkpoint_can_have_is_refused_before_its_first_step(
    ranks: Ranks, spec: Spec
) -> None:
    model = {"factory": "tests.rank.user_models:Telling", "args": {}}
    attempt = ranks.start(spec(model=model), units=())
    assert attempt.ended() == [1, 1]
    (failure,) = attempt.of_kind(0, RankFailed)
    assert "'_extra_state' in the state dict is a dict, not a tensor" in failure.error
    assert attempt.losses() == {}


@pytest.mark.ranks
def test_beside_a_rank_of_an_older_version_nothing_is_compared(ranks: Ranks, spec: Spec) -> None:
    job = spec(model={"factory": "tests.rank.user_models:Centred", "args": {}})
    older = f"{older_trainer.__name__}:train"
    source = ranks.start(job, units=(), trainer=older).succeeded().committed(3)
    folder = CommitChain(ranks.root, JOB).shard_folder(source.checkpoint_id)
    for shard in source.shards:
        with safe_open(folder / shard.name, framework="pt") as file:
            assert "own" not in json.loads(file.metadata()["meshloom"])
    ranks.start(job, fence=2, resume_from=source.checkpoint_id, units=()).succeeded()


@pytest.mark.ranks
def test_an_optimizer_of_slices_goes_on_on_its_mesh_and_is_refused_on_another(
    trained: Trained, ranks: Ranks, spec: Spec
) -> None:
    job = spec(optimizer={"factory": "tests.rank.user_optimizers:Slicewise", "args": {"lr": 0.5}})
    source = trained.committed(3, ranks, job).checkpoint_id
    resumed = ranks.start(job, fence=2, resume_from=source).succeeded()
    assert resumed.losses() == trained.of(job).losses_after(3)
    elsewhere = ranks.start(job, 1, fence=3, resume_from=source)
    assert elsewhere.ended() == [1]
    (failure,) = elsewhere.of_kind(0, RankFailed)
    assert re.search(r"keeps optim\..* on each rank.*'dp_shard': 2", failure.error)
    assert elsewhere.of_kind(0, RankFoundCorrupt) == []
