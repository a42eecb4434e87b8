"""What a probe finds out, in this process; what it survives is the agent's to test."""

import errno
import re
import tempfile
from pathlib import Path

import pytest
import torch
from pydantic import JsonValue
from torch import nn
from torch.nn import functional

from fsdp_core.plan.model import SGD, Conditions, ModelProfile
from fsdp_core.plan.profiling import profile_model
from fsdp_core.plan.study import ModelUnderStudy
from services.contract.jobs.specs import JobSpec
from services.contract.messages.probe_programs import ProbeSeat
from services.contract.messages.probing import ModelProbed, ProbeModel
from services.worker.rank.probe.passes import mean_loss
from services.worker.rank.probe.profile import _is_out_of_memory, probe
from services.worker.rank.process.failures import chain_of
from tests.rank.test_hugging_face import saved

LENGTH = 8
MODELS = "tests.rank.user_models"
DATA = "tests.rank.user_data"
VISION = "tests.rank.user_vision"


def ask(
    model: str = "tests.rank.user_models:OwnLoss",
    stops: tuple[str, ...] = (),
    options: dict[str, JsonValue] | None = None,
) -> ModelProbed:
    wanted: dict[str, JsonValue] = {
        "model": {"factory": model},
        "data": {"factory": "tests.rank.user_data:Counting", "args": {"length": LENGTH}},
        "optimizer": {"factory": "sgd"},
        "train": {"steps": 1},
        **(options or {}),
    }
    question = ProbeModel(
        probe_id=f"probe_{0:032x}",
        spec=JobSpec.model_validate(wanted),
        device_type="cpu",
        conditions=(Conditions(),),
        stops=stops,
    )
    seat = ProbeSeat(
        node_id="here", question=question, memory_bytes=1 << 30, data_roots=(tempfile.gettempdir(),)
    )
    return probe(seat)


class ByForward(nn.Module):
    """Gives logits alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.head = nn.Linear(16, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(tokens))
        return logits


class ByLoss(ByForward):
    """Computes its loss itself, through forward."""

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def boundaries(profile: ModelProfile) -> list[tuple[str, str]]:
    return [(segment.begins, segment.module) for segment in profile.traces[0].segments]


def test_a_model_with_a_loss_of_its_own_is_profiled_as_the_engine_runs_it() -> None:
    answer = ask()
    assert answer.profile is not None
    begins = boundaries(answer.profile)
    assert begins[:3] == [("start", ""), ("forward", ""), ("forward", "embedding")]
    assert begins.index(("forward_end", "")) < begins.index(("loss_backward", ""))
    assert [unit.module for unit in answer.profile.units] == ["embedding", "head"]
    assert (answer.sequence_tokens, answer.optimizer) == (LENGTH, SGD)


def of_trainable(name: str, **options: JsonValue) -> ModelProbed:
    trainable = at(f"tests.rank.user_trainables:{name}")
    return ask(options={"model": None, "trainable": trainable, **options})


def test_a_trainable_is_profiled_by_its_own_passes_and_optimizer() -> None:
    pictures: dict[str, JsonValue] = {
        "data": at("tests.rank.user_vision:Pictures"),
        "loss": at("cross_entropy"),
    }
    alone = of_trainable("Alone", **pictures)
    by_name = ask(options={"model": at("tests.rank.user_vision:Classifier"), **pictures})
    assert alone.profile is not None, alone.failure
    assert by_name.profile is not None
    assert boundaries(alone.profile) == boundaries(by_name.profile)
    assert alone.optimizer == by_name.optimizer == SGD
    doubled = of_trainable("Doubled", train={"steps": 1, "ema": {}}, **pictures)
    assert doubled.profile is not None, doubled.failure
    assert len(boundaries(doubled.profile)) > len(boundaries(alone.profile))
    assert doubled.optimizer is not None
    # Adam's two, and the average of the weights.
    assert doubled.optimizer.state_copies == 3


def test_a_trainable_that_cannot_be_followed_says_why_and_is_not_judged() -> None:
    failure = of_trainable("Gan", data=None).failure
    assert failure is not None
    assert failure.code == "raised"
    assert "does not follow several models" in failure.reason
    assert failure.reason.startswith("model: NotFollowedError")


@pytest.mark.parametrize("replaced", [False, True])
def test_a_loss_may_call_forward_which_stays_the_models_own(*, replaced: bool) -> None:
    model = ByLoss()
    if replaced:
        vars(model)["forward"] = model.forward
    kept = vars(model).get("forward")
    tokens = torch.randint(256, (2, LENGTH + 1))
    computed = [mean_loss(model, tokens) for _ in range(2)]
    assert all(torch.equal(each, model.loss(tokens)) for each in computed)
    assert vars(model).get("forward") is kept


def test_both_ways_to_a_loss_save_as_much() -> None:
    def profile(make: type[nn.Module]) -> ModelProfile:
        def loss(model: nn.Module, sequences: int) -> torch.Tensor:
            return mean_loss(model, torch.zeros(sequences, LENGTH + 1, dtype=torch.int64))

        return profile_model(ModelUnderStudy(make, loss), sizes=(1,))

    by_forward, by_loss = profile(ByForward), profile(ByLoss)
    assert [unit.saved for unit in by_loss.units] == [unit.saved for unit in by_forward.units]
    assert by_loss.flops == by_forward.flops


def at(place: str, **args: JsonValue) -> dict[str, JsonValue]:
    return {"factory": place, "args": args}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"model": at("tests.rank.user_models:Absent")},
            "model.factory: module .* has no 'Absent'",
        ),
        ({"model": at("tests.rank.user_models:NOT_CALLABLE")}, "is not callable"),
        ({"model": at("tests.rank.absent:Model")}, "No module named 'tests.rank.absent'"),
        (
            {"model": at(f"{MODELS}:OwnLoss", dims=2)},
            "unexpected keyword argument 'dims'.*takes dim",
        ),
        ({"optimizer": at("sgd", rate=2)}, "optimizer.args: sgd: .*'rate'"),
        ({"schedule": at("constant", steps_up=2)}, "schedule.args: constant: .*'steps_up'"),
        ({"data": at(f"{DATA}:Counting", width=2)}, "data.args: .*'width'"),
        ({"model": at("builtins:dict")}, "model: TypeError: model.factory made a dict"),
        (
            {"model": at(f"{MODELS}:Particular", heads=3)},
            "model: ValueError: 3 heads do not divide",
        ),
        ({"data": at(f"{DATA}:Particular")}, "data: KeyError: 'width'"),
        ({"data": at("builtins:list")}, "data: DataError: data.factory: the data set .* is empty"),
        ({"data": at("builtins:set")}, "data: DataError: data.factory made a set"),
        ({"loss": at("absent")}, "loss.factory: there is no built-in 'absent'"),
        ({"loss": at("mse", reduction="sum")}, "loss.args: mse: .*'reduction'"),
        (
            {"evaluation": {"metrics": at("absent")}},
            "evaluation.metrics.factory: there is no built-in 'absent'; choose one of accuracy",
        ),
        (
            {"model": at(f"{MODELS}:Noisy"), "loss": at("mse")},
            "model: LossError: loss: a built-in loss finds the target",
        ),
        ({"model": at(f"{VISION}:Classifier")}, "model: RuntimeError: .*same dtype"),
        (
            {
                "model": at(f"{VISION}:Classifier", classes=2),
                "data": at(f"{VISION}:Pictures"),
                "loss": at("mse"),
            },
            r"model: RuntimeError: shape '\[32\]' is invalid for input of size 64",
        ),
    ],
)
def test_what_no_rank_could_build_is_held_against_the_spec(
    options: dict[str, JsonValue], words: str
) -> None:
    failure = ask(options=options).failure
    assert failure is not None
    assert failure.code == "wrong_spec", failure
    assert re.search(words, failure.reason)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": at(f"{MODELS}:AsksForItsRank")}, "model: ValueError: Default process group"),
        ({"model": at(f"{MODELS}:LooksAtValuesWhenBuilt")}, "model: RuntimeError: .*meta"),
        ({"model": at(f"{MODELS}:LooksAtValuesInItsLoss")}, "model: DataDependentOutput"),
        ({"data": at(f"{DATA}:OnAnotherNode")}, "data: FileNotFoundError"),
        ({"optimizer": at("sgd", momentum=-1)}, "optimizer: ValueError: Invalid momentum value"),
        ({"model": at("sys:exit")}, "model: SystemExit"),
    ],
)
def test_what_a_rank_may_do_all_the_same_is_told_and_not_judged(
    options: dict[str, JsonValue], words: str
) -> None:
    failure = ask(options=options).failure
    assert failure is not None
    assert failure.code == "raised", failure
    assert re.match(words, failure.reason)
    assert "Traceback" in str(failure.traceback)


SETS = "tests.rank.user_sets"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"data": at(f"{SETS}:Wide"), "loss": at("next_token"), "model": at(f"{MODELS}:Noisy")},
            r"data: token 1011 is outside the model's embedding of 256 .*first in sample 3 \(",
        ),
        (
            {
                "data": at(f"{SETS}:spoilt", kind="nan"),
                "loss": at("cross_entropy"),
                "model": at(f"{VISION}:Classifier"),
            },
            r"data: sample 7 \(number \d+ of the job\) is the first .* not finite; the loss .* is nan",
        ),
        (
            {
                "data": at(f"{SETS}:spoilt", kind="double"),
                "loss": at("cross_entropy"),
                "model": at(f"{VISION}:Classifier"),
            },
            r"data: the batches are float64, .* \[float64 \[12, 8\], int64 \[12\]\]; have",
        ),
        (
            {
                "data": at("stdlib_bytes", seq_len=8),
                "model": at("decoder", dim=16, heads=2, vocab=200),
            },
            r"data\.args: the tokenizer has 256 tokens, and the model embeds 200; model\.args must",
        ),
    ],
)
def test_samples_by_which_nothing_is_learnt_are_held_against_the_spec(
    options: dict[str, JsonValue], words: str
) -> None:
    failure = ask(options={"train": {"steps": 1, "global_batch": 12}, **options}).failure
    assert failure is not None
    assert failure.code == "wrong_spec", failure
    assert re.match(words, failure.reason), failure.reason


@pytest.mark.parametrize(
    "options",
    [
        {"data": at(f"{SETS}:Wide"), "model": at(f"{MODELS}:Hashed")},
        {"data": at("stdlib_bytes", seq_len=8), "model": at(f"{MODELS}:Hashed")},
        *(
            {
                "data": at(f"{SETS}:spoilt", kind=kind),
                "loss": at("cross_entropy"),
                "model": at(f"{VISION}:FillsGaps"),
            }
            for kind in ("nan", "double")
        ),
    ],
)
def test_what_a_model_does_with_unusual_samples_is_its_own(options: dict[str, JsonValue]) -> None:
    found = ask(options={"train": {"steps": 1, "global_batch": 12}, **options})
    assert found.profile is not None, found.failure


def test_a_model_that_compares_the_samples_of_a_batch_is_followed_with_two_and_more() -> None:
    found = ask(options={"model": at(f"{MODELS}:ComparesTheBatch")})
    assert found.profile is not None, found.failure
    assert found.profile.smallest == 2
    assert found.profile.built_whole


@pytest.mark.parametrize(
    ("model", "kind", "loss"),
    [
        ("Classifier", "tuple", at("cross_entropy")),
        ("WithLoss", "dict", None),
        ("OfPictures", "dataclass", at(f"{VISION}:smoothed")),
    ],
)
def test_batches_of_any_nesting_are_followed(
    model: str, kind: str, loss: dict[str, JsonValue] | None
) -> None:
    options: dict[str, JsonValue] = {
        "model": at(f"{VISION}:{model}"),
        "data": at(f"{VISION}:Pictures", kind=kind),
        "loss": loss,
    }
    found = ask(options=options)
    assert found.profile is not None, found.failure
    assert (found.sequence_tokens, found.throughput_unit) == (1, "samples")
    # Forward and backward of three layers on one picture, whatever it comes in.
    weights = 8 * 8 + 8 * 8 + 8 * 4
    assert found.profile.flops.slope == pytest.approx(3 * 2 * weights - 2 * 8 * 8, rel=0.2)


def test_models_of_transformers_are_followed_as_they_are(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    found = ask(options={"model": at("hf_causal_lm", config=str(tmp_path))})
    assert found.profile is not None, found.failure
    assert (found.sequence_tokens, found.throughput_unit) == (LENGTH, "tokens")
    assert "model.layers.0" in {unit.module for unit in found.profile.units}
    assert not found.profile.built_whole


def test_a_unit_that_no_module_has_is_refused() -> None:
    failure = ask(stops=("absent",)).failure
    assert failure is not None
    assert failure.code == "refused"
    assert "no modules ['absent']" in failure.reason


def test_want_of_memory_is_seen_behind_other_errors() -> None:
    refused = RuntimeError("DefaultCPUAllocator: Error code 12 (Cannot allocate memory)")
    for error in (MemoryError(), OSError(errno.ENOMEM, "no"), refused):
        wrapped = ValueError("the model could not be built")
        wrapped.__cause__ = error
        assert any(map(_is_out_of_memory, chain_of(wrapped)))
    ring = ValueError("a ring")
    ring.__cause__ = KeyError("of causes")
    ring.__cause__.__context__ = ring
    assert not any(map(_is_out_of_memory, chain_of(ring)))
