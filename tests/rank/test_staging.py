"""Copies that are made beside the next step: of the agreed step, or the checkpoint fails."""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fsdp_core.plan.model import UnitPlan
from services.contract.jobs.specs import JobSpec
from services.contract.messages.rank_pipe import (
    RankCheckpointBegan,
    RankCheckpointFailed,
    RankFailed,
    RankMessage,
    RankVote,
)
from services.contract.storage.commit_chain import CommitChain
from services.worker.rank.checkpoints import shard_file
from services.worker.rank.checkpoints.staging import Staged
from services.worker.rank.checkpoints.state import TrainingState
from services.worker.rank.checkpoints.writer import CheckpointWriteError, CheckpointWriter
from tests.rank.gang import JOB, Attempt, Ranks
from tests.rank.test_checkpoints import seat_of

Spec = Callable[..., JobSpec]

MODELS = "tests.rank.user_models"
SLOW = (UnitPlan(("embedding",)), UnitPlan(("slow",)))
GATED = "tests.rank.gated_trainer:train"
PATIENCE_S = 60


def remembers(**args: int) -> dict[str, object]:
    return {"factory": "tests.rank.user_models:Remembers", "args": args}


def saved(attempt: Attempt, rank: int, step: int) -> dict[str, torch.Tensor]:
    (vote,) = (vote for vote in attempt.of_kind(rank, RankVote) if vote.step == step)
    folder = CommitChain(attempt.root, JOB).shard_folder(vote.checkpoint_id)
    return load_file(folder / vote.shard.name)


@pytest.mark.ranks
def test_what_is_copied_after_the_next_backward_pass_is_the_agreed_step_bit_for_bit(
    ranks: Ranks, spec: Spec
) -> None:
    at_once = ranks.start(spec(model=remembers(), checkpoint={"mode": "sync"}), units=())
    at_once.succeeded()
    beside = ranks.start(spec(model=remembers()), fence=2, units=(), trainer=GATED).succeeded()
    assert beside.losses() == at_once.losses()
    for rank, step in itertools.product((0, 1), (3, 6)):
        one, other = saved(at_once, rank, step), saved(beside, rank, step)
        assert one.keys() == other.keys() > {"model.head.weight", "optim.head.weight.exp_avg"}
        assert all(torch.equal(one[name], other[name]) for name in one)
    # Rank 0 saves the buffers. Each of the passes after step 3 changed it before it could be copied.
    assert saved(beside, 0, 3)["model.memory"].ne(saved(beside, 0, 6)["model.memory"]).all()


@pytest.mark.ranks
@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"factory": f"{MODELS}:Slow"}},
        {
            "model": None,
            "trainable": {"factory": "tests.rank.user_trainables:Shrinking"},
            "data": {"factory": "tests.rank.user_vision:Pictures"},
            "loss": {"factory": "cross_entropy"},
        },
    ],
)
def test_what_user_code_changes_before_an_update_is_saved_as_it_was(
    ranks: Ranks, spec: Spec, changes: dict[str, Any]
) -> None:
    plain = spec().model_dump(mode="json") | changes
    modes = [
        JobSpec.model_validate(plain | {"checkpoint": {"every_steps": 3, "mode": mode}})
        for mode in ("sync", "async")
    ]
    units = SLOW if changes["model"] else ()
    at_once = ranks.start(modes[0], units=units).succeeded()
    beside = ranks.start(modes[1], fence=2, units=units, trainer=GATED).succeeded()
    for rank in (0, 1):
        one, other = saved(at_once, rank, 3), saved(beside, rank, 3)
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.ranks
def test_a_forward_that_changes_a_sharded_parameter_costs_the_checkpoint(
    ranks: Ranks, spec: Spec
) -> None:
    job = spec(model={"factory": f"{MODELS}:Bounded", "args": {}})
    attempt = ranks.start(job, units=SLOW, trainer=GATED).succeeded()
    for rank in (0, 1):
        (failed,) = attempt.of_kind(rank, RankCheckpointFailed)
        assert "model.embedding.weight was changed between two optimizer steps" in failed.reason
        assert [vote.step for vote in attempt.of_kind(rank, RankVote)] == [6]


@pytest.mark.ranks
def test_a_rank_that_leaves_with_a_bad_loss_abandons_what_it_was_saving(
    ranks: Ranks, spec: Spec
) -> None:
    job = spec(model=remembers(spoilt_pass=4), train={"micro_batch": 6})
    attempt = ranks.start(job, units=(), trainer=GATED)
    assert attempt.ended() == [1, 1]
    for rank in (0, 1):
        *_, lost, failed = attempt.messages[rank]
        assert isinstance(lost, RankCheckpointFailed)
        assert "AbandonedError" in lost.reason
        assert isinstance(failed, RankFailed)
        assert failed.error.startswith("NonFiniteLossError: the loss of step 4")
    chain = CommitChain(ranks.root, JOB)
    assert [list(folder.iterdir()) for folder in chain.uncommitted()] in ([], [[]])


class Gate:
    """Holds each copying up until it is opened for it."""

    def __init__(self) -> None:
        self._opened = threading.Semaphore(0)

    def open(self) -> None:
        self._opened.release()

    def pass_through(self) -> None:
        assert self._opened.acquire(timeout=PATIENCE_S)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    made = Staged.make

    def make(staged: Staged, go_on: Callable[[], None]) -> Mapping[str, torch.Tensor]:
        gate.pass_through()
        return made(staged, go_on)

    monkeypatch.setattr(Staged, "make", make)
    return gate


class Saves:
    """A writer, what it told, and what it wrote."""

    def __init__(self, root: Path, spec: JobSpec) -> None:
        self.told: list[RankMessage] = []
        self._chain = CommitChain(root, JOB)
        self.writer = CheckpointWriter(
            seat_of(root, spec), self.told.append, "async", data_digest="d", resumed_step=0
        )

    def begin(self, step: int, lasting: torch.Tensor, passing: torch.Tensor) -> None:
        tensors = {"lasting": lasting, "passing": passing}
        self.writer.save(TrainingState(step, 0.5, tensors, {}, {"lasting": lasting}))

    def written(self) -> dict[str, list[float]]:
        vote = self.told[-1]
        assert isinstance(vote, RankVote), vote
        file = self._chain.shard_folder(vote.checkpoint_id) / vote.shard.name
        return {name: tensor.tolist() for name, tensor in load_file(file).items()}

    def drafts(self) -> list[Path]:
        return [file for folder in self._chain.uncommitted() for file in folder.iterdir()]

    def failure(self) -> str:
        failed = self.told[-1]
        assert isinstance(failed, RankCheckpointFailed), failed
        return failed.reason


@pytest.fixture
def saves(tmp_path: Path, spec: Spec) -> Saves:
    return Saves(tmp_path, spec())


def test_an_update_waits_for_the_copies_and_buffers_may_change_at_once(
    saves: Saves, gate: Gate
) -> None:
    parameter, buffer = torch.zeros(4), torch.zeros(2)
    for step in (1, 2):  # the second into the memory of the first
        saves.begin(step, parameter, buffer)
        buffer += 1  # in the next forward pass
        assert saves.writer.is_copying
        update = threading.Thread(target=saves.writer.release)
        update.start()
        update.join(0.1)
        assert update.is_alive()
        gate.open()
        update.join(PATIENCE_S)
        assert not saves.writer.is_copying
        parameter += 1
        saves.writer.finish(step)
        assert saves.written() == {"lasting": [step - 1] * 4, "passing": [step - 1] * 2}


def test_memory_is_taken_once(saves: Saves) -> None:
    places = []
    for step in (1, 2, 3):
        saves.begin(step, torch.zeros(4), torch.zeros(2))
        saves.writer.finish(step)
        kept = saves.writer._staging._kept
        places.append({name: copy.data_ptr() for name, copy in kept.items()})
    assert places[0] == places[1] == places[2]
    saves.begin(4, torch.zeros(5), torch.zeros(2))
    saves.writer.finish(4)
    assert saves.written() == {"lasting": [0] * 5, "passing": [0] * 2}


def test_a_copy_that_fails_costs_the_checkpoint_and_training_goes_on(saves: Saves) -> None:
    saves.begin(1, torch.zeros(4, device="meta"), torch.zeros(2))
    saves.writer.release()
    with pytest.raises(CheckpointWriteError, match="after step 1"):
        saves.writer.finish(1)
    assert "meta tensor" in saves.failure()
    saves.begin(2, torch.ones(4), torch.zeros(2))
    saves.writer.finish(2)
    assert saves.written() == {"lasting": [1] * 4, "passing": [0] * 2}


def test_a_copy_that_fails_before_training_goes_on_costs_the_checkpoint_too(saves: Saves) -> None:
    saves.begin(1, torch.zeros(4), torch.zeros(2, device="meta"))
    assert "meta tensor" in saves.failure()
    assert not saves.writer.is_copying
    saves.begin(2, torch.zeros(4), torch.zeros(2))
    saves.writer.finish(2)
    assert saves.written() == {"lasting": [0] * 4, "passing": [0] * 2}


def test_what_somebody_else_changes_is_not_saved_and_from_then_on_training_waits(
    saves: Saves, gate: Gate
) -> None:
    parameter = torch.zeros(4)
    saves.begin(1, parameter, torch.zeros(2))
    parameter += 1  # in a backward pass, say
    gate.open()
    saves.writer.release()
    saves.writer.finish(2)
    assert "lasting was changed between two optimizer steps" in saves.failure()
    saves.begin(2, parameter, torch.zeros(2))
    parameter += 1
    gate.open()
    saves.writer.finish(2)
    assert saves.written() == {"lasting": [1] * 4, "passing": [0] * 2}


def test_the_update_that_was_waited_for_is_no_change(saves: Saves, gate: Gate) -> None:
    parameter = torch.zeros(4)
    saves.begin(1, parameter, torch.zeros(2))
    gate.open()
    saves.writer.release()
    parameter += 1
    saves.writer.finish(1)
    assert saves.written()["lasting"] == [0] * 4


class SpoiltError(Exception):
    """Ends a run."""


def test_an_abandoned_shard_leaves_no_draft_and_is_told(
    saves: Saves, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = shard_file._parts
    begun = threading.Event()

    def held_up(
        tensors: Mapping[str, torch.Tensor], text: Mapping[str, str]
    ) -> Iterator[bytes | memoryview]:
        for part in parts(tensors, text):
            yield part
            begun.set()
            assert saves.writer._abandoned.wait(PATIENCE_S)

    monkeypatch.setattr(shard_file, "_parts", held_up)
    saves.begin(1, torch.zeros(4), torch.zeros(2))
    assert begun.wait(PATIENCE_S)
    assert len(saves.drafts()) == 1
    with pytest.raises(SpoiltError), saves.writer:
        raise SpoiltError
    thread = saves.writer._in_flight
    assert thread is not None
    thread.join(PATIENCE_S)
    assert saves.drafts() == []
    assert saves.failure() == "AbandonedError: the rank ended before its shard was written"


def test_a_rank_that_fails_does_not_wait_for_storage_that_hangs(
    saves: Saves, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers = threading.Event(), threading.Event()

    def hang(_: Path) -> None:
        asked.set()
        assert answers.wait(PATIENCE_S)

    monkeypatch.setattr(shard_file, "sync_folder", hang)
    saves.begin(1, torch.zeros(4), torch.zeros(2))
    assert asked.wait(PATIENCE_S)
    with pytest.raises(SpoiltError), saves.writer:
        raise SpoiltError
    thread = saves.writer._in_flight
    assert thread is not None
    assert thread.is_alive()
    assert [type(message) for message in saves.told] == [RankCheckpointBegan]
    answers.set()
    thread.join(PATIENCE_S)


def test_a_run_that_ends_well_abandons_nothing(saves: Saves) -> None:
    with saves.writer:
        saves.begin(1, torch.zeros(4), torch.zeros(2))
        saves.writer.finish(1)
    assert saves.written() == {"lasting": [0] * 4, "passing": [0] * 2}
