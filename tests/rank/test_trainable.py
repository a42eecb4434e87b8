"""A user's Trainable: several models, optimizers and losses in the loop that parts by name have."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fsdp_core.checkpoint import SavedShard, local_shards
from fsdp_core.errors import PlanError
from fsdp_core.plan.model import MeshPlan, ShardingPlan, UnitPlan
from services.contract.jobs.specs import JobSpec
from services.contract.messages.rank_pipe import (
    RankEvaluated,
    RankFailed,
    RankFoundCorrupt,
    RankReady,
    RankVote,
)
from services.contract.storage.commit_chain import CommitChain
from services.contract.storage.manifests import Manifest
from services.contract.words.ids import checkpoint_id
from services.worker.rank.checkpoints import own_tensors, shard_file
from services.worker.rank.checkpoints.beside import UnsavableStateError, flattened, restored
from services.worker.rank.checkpoints.state import about_of, as_text
from services.worker.rank.models.several import Models
from tests.rank.gang import JOB, Attempt, Ranks, Trained
from tests.rank.user_trainables import blocks

Spec = Callable[..., JobSpec]
USER = "tests.rank.user_trainables"
UNITS = (UnitPlan(("generator.*",)), UnitPlan(("discriminator.0", "discriminator.2")))


def of(spec: Spec, trainable: str, **changes: object) -> JobSpec:
    plain = spec().model_dump(mode="json")
    given = {"model": None, "data": None, "trainable": {"factory": f"{USER}:{trainable}"}}
    return JobSpec.model_validate(plain | given | changes)


@pytest.fixture
def gan(spec: Spec) -> JobSpec:
    train = {"steps": 6, "global_batch": 12, "seed": 7, "ema": {"decay": 0.5, "every": 2}}
    return of(spec, "Gan", train=train)


def saved(attempt: Attempt, step: int) -> dict[str, torch.Tensor]:
    """All that the ranks of an attempt saved, by rank and name."""
    return {
        f"{path.name} {name}": tensor
        for path in files(attempt, step)
        for name, tensor in load_file(path).items()
    }


def files(attempt: Attempt, step: int) -> list[Path]:
    """The shards of its checkpoint, which need not be committed."""
    votes = attempt.of_kind(0, RankVote)
    name = next(vote.checkpoint_id for vote in votes if vote.step == step)
    return sorted((attempt.root / JOB / "shards" / name).iterdir())


@pytest.mark.ranks
def test_two_models_learn_by_two_losses(trained: Trained, gan: JobSpec) -> None:
    run = trained.of(gan, units=UNITS)
    losses = run.losses()
    assert losses == run.losses(1)
    assert losses[6] != losses[1]
    ready = run.of_kind(0, RankReady)[0]
    assert ready.units == (
        "generator",
        *(f"generator.{place}" for place in range(5)),
        "discriminator",
        "discriminator.0, discriminator.2",
    )
    (evaluation,) = run.of_kind(0, RankEvaluated)
    assert evaluation.tokens == 6
    alone = trained.of(gan, 1, units=UNITS)
    assert alone.losses() == pytest.approx(losses, abs=1e-5)
    assert alone.of_kind(0, RankEvaluated)[0].loss == pytest.approx(evaluation.loss, abs=1e-5)


@pytest.mark.ranks
def test_all_of_a_trainable_is_resumed_bit_for_bit_and_at_another_world_size(
    trained: Trained, ranks: Ranks, gan: JobSpec
) -> None:
    source = trained.committed(3, ranks, gan, units=UNITS).checkpoint_id
    whole = trained.of(gan, units=UNITS)
    same = ranks.start(gan, fence=2, resume_from=source, units=UNITS).succeeded()
    assert same.losses() == whole.losses_after(3)
    once, again = saved(whole, 6), saved(same, 6)
    assert once.keys() == again.keys()
    assert all(torch.equal(once[name], again[name]) for name in once)
    kinds = {name.split()[1].split(".")[0] for name in once}
    assert kinds == {"model", "optim", "ema", "beside", "random"}
    other = ranks.start(gan, 3, fence=3, resume_from=source, units=UNITS).succeeded()
    assert other.losses() == pytest.approx(whole.losses_after(3), abs=1e-5)
    ends = [run.of_kind(0, RankEvaluated)[-1].loss for run in (whole, same, other)]
    assert ends[0] == ends[1]
    assert ends[0] == pytest.approx(ends[2], abs=1e-5)


@pytest.mark.ranks
def test_what_each_rank_of_a_trainable_has_of_its_own_is_resumed(
    trained: Trained, ranks: Ranks, spec: Spec
) -> None:
    data, loss = {"factory": "tests.rank.user_vision:Pictures"}, {"factory": "cross_entropy"}
    job = of(spec, "Remembering", data=data, loss=loss)
    manifest = trained.committed(3, ranks, job)
    source = manifest.checkpoint_id
    same = ranks.start(job, fence=2, resume_from=source).succeeded()
    assert same.losses() == trained.of(job).losses_after(3)
    # Elsewhere all get that of rank 0, and what torch's optimizers count is the same everywhere.
    ranks.start(job, 1, fence=3, resume_from=source).succeeded()
    older = without_own(ranks, manifest)
    ranks.start(job, fence=5, resume_from=older).succeeded()


def without_own(ranks: Ranks, manifest: Manifest) -> str:
    """Commits a checkpoint again, as versions wrote it in which only rank 0 saved what is no slice; answers its name."""
    chain = CommitChain(ranks.root, JOB)
    folder = chain.shard_folder(manifest.checkpoint_id)
    name = checkpoint_id(JOB, manifest.step, 4)
    shards = []
    for shard in manifest.shards:
        with shard_file.opened(folder, shard) as reader:
            about = about_of(reader)
            del about["own"]
            read = load_file(folder / shard.name)
            tensors = {n: each for n, each in read.items() if not n.startswith(own_tensors.PREFIX)}
            text = as_text(about)
            shards.append(shard_file.write(chain.shard_folder(name), shard.rank, tensors, text))
    written = {"checkpoint_id": name, "fence": 4, "shards": tuple(shards)}
    chain.append(manifest.model_copy(update=written))
    return name


@pytest.mark.ranks
def test_gradients_that_wait_for_an_update_are_resumed(
    trained: Trained, ranks: Ranks, spec: Spec
) -> None:
    data, loss = {"factory": "tests.rank.user_vision:Pictures"}, {"factory": "cross_entropy"}
    job = of(spec, "Accumulating", data=data, loss=loss)
    source = trained.committed(3, ranks, job).checkpoint_id
    whole = trained.of(job)
    same = ranks.start(job, fence=2, resume_from=source).succeeded()
    assert same.losses() == whole.losses_after(3)
    other = ranks.start(job, 3, fence=3, resume_from=source).succeeded()
    assert other.losses() == pytest.approx(whole.losses_after(3), abs=1e-5)


@pytest.mark.ranks
def test_rates_that_a_trainable_sets_itself_are_resumed(
    trained: Trained, ranks: Ranks, spec: Spec
) -> None:
    data, loss = {"factory": "tests.rank.user_vision:Pictures"}, {"factory": "cross_entropy"}
    job = of(spec, "Slowing", data=data, loss=loss)
    source = trained.committed(3, ranks, job).checkpoint_id
    same = ranks.start(job, fence=2, resume_from=source).succeeded()
    assert same.losses() == trained.of(job).losses_after(3)


@pytest.mark.ranks
def test_what_user_code_lacks_to_go_on_makes_no_checkpoint_corrupt(
    trained: Trained, ranks: Ranks, spec: Spec, gan: JobSpec
) -> None:
    source = trained.committed(3, ranks, gan, units=UNITS).checkpoint_id
    dependent = of(spec, "Dependent", train=gan.train.model_dump(mode="json"))
    resumed = ranks.start(dependent, fence=2, resume_from=source, units=UNITS)
    assert resumed.ended() == [1, 1]
    told = [resumed.of_kind(rank, RankFoundCorrupt) for rank in (0, 1)]
    assert told == [[], []]
    failures = [failure.error for rank in (0, 1) for failure in resumed.of_kind(rank, RankFailed)]
    assert any(each.startswith("ConnectionRefusedError: the server of") for each in failures)


@pytest.mark.ranks
def test_a_trainable_that_adds_nothing_trains_as_its_parts_do(trained: Trained, spec: Spec) -> None:
    data = {"factory": "tests.rank.user_vision:Pictures"}
    loss = {"factory": "cross_entropy"}
    by_name = of(spec, "Alone", data=data, loss=loss).model_dump(mode="json") | {
        "trainable": None,
        "model": {"factory": "tests.rank.user_vision:Classifier"},
    }
    parts = trained.of(JobSpec.model_validate(by_name))
    alone = trained.of(of(spec, "Alone", data=data, loss=loss))
    assert alone.losses() == parts.losses()


@pytest.mark.ranks
def test_a_job_of_parts_saves_what_older_versions_save(trained: Trained, spec: Spec) -> None:
    run = trained.of(spec())
    names = {name.split()[1].split(".")[0] for name in saved(run, 3)}
    assert names == {"model", "optim", "random"}
    with safe_open(files(run, 3)[0], framework="pt") as file:
        about = json.loads(file.metadata()["meshloom"])
    assert about.pop("own") == {}  # which older versions do not read
    assert about.keys() == {
        *("version", "step", "rank", "world_size", "mesh", "data_digest", "data", "boxes"),
        *("python_random", "numpy_random"),
    }


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("trainable", "data", "words"),
    [
        ("Alone", None, "data: the spec names none, and Alone.build_data returns none"),
        ("blocks", None, "blocks: missing a required argument"),
        ("Points", None, "trainable.factory made a Points, not a meshloom.Trainable"),
        ("Stepping", "tests.rank.user_vision:Pictures", "unless the class sets steps_itself"),
    ],
)
def test_a_trainable_that_cannot_be_says_why(
    ranks: Ranks, spec: Spec, trainable: str, data: str | None, words: str
) -> None:
    named = None if data is None else {"factory": data}
    job = of(spec, trainable, data=named, loss={"factory": "cross_entropy"})
    attempt = ranks.start(job, 1)
    assert attempt.ended() == [1]
    (failure,) = attempt.of_kind(0, RankFailed)
    assert words in failure.error


def test_each_model_has_the_units_that_begin_with_its_name() -> None:
    models = Models.of({"one": blocks(2, 2), "two": blocks(2, 2)})
    units = (UnitPlan(("one.0",)), UnitPlan(("*.2",)), UnitPlan(("two",)), UnitPlan(("",)))
    plans = models.plans(ShardingPlan(MeshPlan(), units))
    assert [unit.modules for unit in plans["one"].units] == [("0",), ("2",), ("",)]
    assert [unit.modules for unit in plans["two"].units] == [("2",), ("",), ("",)]
    for wrong in (("three.0",), ("one.9",), ("0",)):
        with pytest.raises(PlanError, match="begins with the name of one of them"):
            models.plans(ShardingPlan(MeshPlan(), (UnitPlan(wrong),)))
    with pytest.raises(PlanError, match="two models"):
        models.plans(ShardingPlan(MeshPlan(), (UnitPlan(("one.0", "two.0")),)))


@pytest.mark.parametrize("built", [{}, {"a.b": blocks(1, 1)}, {"one": 3}, 3])
def test_what_is_no_model_is_refused(built: object) -> None:
    with pytest.raises(TypeError, match="build_model"):
        Models.of(built)


@pytest.mark.parametrize("state", [{"a": {1: 2}}, {"a": [Path()]}])
def test_a_state_that_json_and_tensors_cannot_say_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(UnsavableStateError, match=r"state_dict: .*beside\.a"):
        flattened(state)


def test_a_tensor_without_elements_comes_back() -> None:
    other = torch.ones(2)
    state = {"buffer": [torch.zeros(0, 3, dtype=torch.bfloat16)], "other": other}
    parts = flattened(state)
    assert parts.tensors.keys() == {"beside.other"}
    document = json.loads(json.dumps(parts.document))
    entries = local_shards(parts.tensors)
    saved = [
        SavedShard(
            each.fqn, each.global_shape, each.offsets, each.global_shape, each.tensor.__getitem__
        )
        for each in entries
    ]
    back = restored(document, saved, {})
    (buffer,) = back["buffer"]
    assert (buffer.shape, buffer.dtype) == ((0, 3), torch.bfloat16)
    assert torch.equal(back["other"], other)
