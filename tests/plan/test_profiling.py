"""Profiles: what is found out about a model without giving it memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import psutil
import pytest
import torch
from pydantic import TypeAdapter
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fsdp_core.errors import PlanError
from fsdp_core.plan.candidates import candidate_units
from fsdp_core.plan.model import (
    ADAMW_FUSED,
    SGD,
    Conditions,
    Growth,
    MatrixState,
    MeshPlan,
    ModelProfile,
    OptimizerFacts,
    PassTimes,
    ShardingPlan,
    Training,
    UnitPlan,
    estimate,
)
from fsdp_core.plan.model.sharding import Precision
from fsdp_core.plan.optimizer_facts import optimizer_facts
from fsdp_core.plan.pass_timing import Effort, timing_passes
from fsdp_core.plan.profiling import profile_model
from fsdp_core.plan.study import ModelUnderStudy
from tests.plan.suite import VOCAB, ConvNet, Encoder, Mlp, image_loss, next_token_loss, vector_loss
from tests.plan.wide_suite import ByRows, CheckpointedMlp, Lion, Towers, in_batch_loss

WIDTH, HIDDEN, LAYERS = 256, 64, 3
BOTH = (Conditions(), Conditions(recompute=True))
SMALL = Effort(1 << 10, Growth(0, 1 << 10), Growth(0, 1 << 10))


def mlp_study() -> ModelUnderStudy:
    return ModelUnderStudy(partial(Mlp, WIDTH, HIDDEN, LAYERS), vector_loss)


@pytest.fixture(scope="module")
def mlp() -> ModelProfile:
    return profile_model(mlp_study(), BOTH)


def test_repeated_blocks_are_found_and_what_stands_beside_them() -> None:
    assert candidate_units(Encoder(layers=2)) == {
        "embed": "embedding",
        "layers.0": "block",
        "layers.1": "block",
        "head": "head",
    }
    assert list(candidate_units(ConvNet(8, 2))) == ["stem", "blocks.0", "blocks.1", "head"]
    assert candidate_units(nn.Linear(2, 2)) == {}


class Halves(nn.Module):
    """Two maps that can be run as one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.second = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        second: torch.Tensor = self.second(self.first(x).to(self.second.weight.dtype))
        return second


class Loose(nn.Module):
    """Runs some of its blocks, parts of others, reads the weights of some and forgets one."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.run = nn.ModuleList(Halves(dim) for _ in range(2))
        self.parted = nn.ModuleList(Halves(dim) for _ in range(2))
        self.read = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.forgotten = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.head = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.run:
            # Dtypes and shapes are those of slices as well.
            assert isinstance(block, Halves)
            x = block(x.to(block.first.weight.dtype)) * block.first.weight.dim()
        for block in self.parted:
            assert isinstance(block, Halves)
            x = block.second(functional.relu(block.first(x)))
        for block in self.read:
            x = block(x) + functional.linear(x, block.get_parameter("weight"))
        head: torch.Tensor = self.head(self.forgotten[0](x))
        return head


def test_what_is_used_beside_its_own_forward_is_no_unit() -> None:
    study = ModelUnderStudy(Loose, lambda model, size: model(torch.rand(size, 16)).sum())
    found = {unit.module for unit in profile_model(study, sizes=(1, 2)).units}
    assert found == {"run.0", "run.1", "forgotten.0", "head"}


def test_a_profile_survives_json(mlp: ModelProfile) -> None:
    adapter = TypeAdapter(ModelProfile)
    assert adapter.validate_json(adapter.dump_json(mlp)) == mlp


def test_a_profile_of_another_version_is_refused(mlp: ModelProfile) -> None:
    with pytest.raises(PlanError, match="version 2"):
        replace(mlp, version=2)


def test_what_is_saved_counts_no_parameters_and_nothing_twice(mlp: ModelProfile) -> None:
    first, second = mlp.units[:2]
    # Its input, which for the first is the batch, and ReLU's output, which is the next one's
    # input as well.
    assert first.saved == second.saved == Growth(0, 4 * (WIDTH + HIDDEN))
    assert first.outputs == Growth(0, 4 * WIDTH)


def test_flops_are_those_of_the_matrix_products(mlp: ModelProfile) -> None:
    first, second = mlp.units[:2]
    product = 2 * WIDTH * HIDDEN
    # Forward, then a gradient of the weight and one of the input: but nobody wants the batch's.
    assert first.flops == Growth(0, (3 + 2) * product)
    assert second.flops == Growth(0, (3 + 3) * product)


def test_recomputation_keeps_only_inputs_until_backward(mlp: ModelProfile) -> None:
    kept, again = (
        {s.module: s.change for s in trace.segments if s.begins == "forward"}
        for trace in mlp.traces
    )
    assert kept["layers.1"] == Growth(0, 4 * (WIDTH + HIDDEN))
    assert again["layers.1"] == Growth(0, 4 * WIDTH)


def timed(
    study: ModelUnderStudy, memory: int, param_dtype: Precision | None = None
) -> PassTimes | None:
    with timing_passes(study, SMALL, memory, param_dtype) as found:
        return found()


def test_passes_of_a_model_that_fits_are_timed_in_a_process_of_their_own(
    mlp: ModelProfile,
) -> None:
    study = mlp_study()
    found = profile_model(study, BOTH, timed_within=1 << 30)
    assert replace(found, timed=None) == mlp, "nothing else depends on it"
    assert found.timed is not None
    sizes = [size for size, _, _ in found.timed.seconds]
    assert sizes == sorted(sizes)
    assert min(found.timed.flops, *(min(times[1:]) for times in found.timed.seconds)) > 0
    assert timed(study, 1 << 10) is None
    assert timed(study, 1 << 30, "bf16") is not None


def test_the_process_that_times_passes_ends_with_what_is_done_beside_it() -> None:
    def lingers(model: nn.Module, size: int) -> torch.Tensor:
        del model, size
        signal.pause()
        raise AssertionError

    before = psutil.Process().children()
    with (
        pytest.raises(PlanError),
        timing_passes(replace(mlp_study(), loss=lingers), SMALL, 1 << 30, None),
    ):
        raise PlanError("the model cannot be followed")
    assert set(psutil.Process().children()) <= set(before)


def test_a_model_that_fails_or_dies_when_it_really_runs_is_not_timed() -> None:
    def dies(model: nn.Module, size: int) -> torch.Tensor:
        del model, size
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def fails(model: nn.Module, size: int) -> torch.Tensor:
        raise RuntimeError(f"{size} samples are not to my taste: {type(model)}")

    for loss in (dies, fails):
        assert timed(replace(mlp_study(), loss=loss), 1 << 30) is None


@pytest.mark.timeout(60)
def test_a_process_that_a_model_leaves_behind_does_not_hold_it_up() -> None:
    waiting, over = os.pipe()

    def leaves(model: nn.Module, size: int) -> torch.Tensor:
        if os.fork() == 0:
            os.close(over)
            os.read(waiting, 1)
            os._exit(0)
        return vector_loss(model, size)

    try:
        assert timed(replace(mlp_study(), loss=leaves), 1 << 30) is not None
    finally:
        os.close(over)
        os.close(waiting)


def test_ties_stay_tied_and_frozen_parameters_frozen() -> None:
    def make() -> nn.Module:
        model = Encoder(layers=1, tied=True)
        model.layers.requires_grad_(requires_grad=False)
        return model

    profile = profile_model(ModelUnderStudy(make, next_token_loss), sizes=(1,))
    facts = {each.name: each for each in profile.parameters}
    assert facts["embed.weight"].also == ("head.weight",)
    assert facts["embed.weight"].is_embedding
    with_grads = {place for s in profile.traces[0].segments for place in s.grads}
    assert [profile.parameters[place].name for place in with_grads] == ["embed.weight"]


def test_an_embedding_with_a_largest_norm_is_written_in_forward() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(VOCAB, 8, max_norm=1.0), nn.Linear(8, VOCAB))

    profile = profile_model(ModelUnderStudy(make, next_token_loss), sizes=(1,))
    assert [each.is_written for each in profile.parameters] == [True, False, False]


def test_attention_is_counted_as_the_device_computes_it() -> None:
    def attend(model: nn.Module, batch: int) -> torch.Tensor:
        x = model(torch.randn(batch, 4, 512, 16))
        return functional.scaled_dot_product_attention(x, x, x).sum()

    profile = profile_model(ModelUnderStudy(lambda: nn.Linear(16, 16), attend), sizes=(1,))
    scores = 4 * 4 * 512 * 512
    assert max(s.peak.at(1) for s in profile.traces[0].segments) < scores


def test_a_model_for_a_device_that_is_not_here_is_refused() -> None:
    if torch.accelerator.is_available():
        return
    study = ModelUnderStudy(Encoder, next_token_loss, device_type="cuda")
    with pytest.raises(PlanError, match="only where there is such a device"):
        profile_model(study)


def test_a_stop_that_is_no_module_is_refused() -> None:
    with pytest.raises(PlanError, match=r"no modules \['absent'\]"):
        profile_model(mlp_study(), stops=["absent"])


def test_a_stop_may_be_a_pattern_as_of_a_plans_units() -> None:
    followed = profile_model(mlp_study(), stops=["layers.*.0"], sizes=(1,))
    assert {"layers.0.0", "layers.1.0"} <= set(followed.stops)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in ranks: several of a kernel's threads take by chance what they take at one time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_what_was_not_measured_is_not_guessed(mlp: ModelProfile) -> None:
    with pytest.raises(PlanError, match="param_dtype='bf16'"):
        estimate(mlp, ShardingPlan(MeshPlan(dp_shard=2), param_dtype="bf16"), Training(1))
    inner = ShardingPlan(MeshPlan(dp_shard=2), (UnitPlan(("layers.0.0",)),))
    with pytest.raises(PlanError, match=r"not followed at \['layers\.0\.0'\]"):
        estimate(mlp, inner, Training(1))
    followed = profile_model(mlp_study(), stops=["layers.0.0"], sizes=(1,))
    assert estimate(followed, inner, Training(1)).peak.memory.total > 0


def test_sizes_that_were_not_followed_are_predicted() -> None:
    study = ModelUnderStudy(partial(ConvNet, 8, 2), image_loss)
    plan = ShardingPlan(MeshPlan(dp_shard=2), (UnitPlan(("blocks.*",)),))
    few, many = (profile_model(study, sizes=sizes) for sizes in ((1, 2, 4), (48,)))
    for_many = estimate(many, plan, Training(48), only_tensors=True).peak
    assert estimate(few, plan, Training(48), only_tensors=True).peak == for_many
    whole = [estimate(each, plan, Training(48)).peak.memory.total for each in (few, many)]
    assert whole[0] == pytest.approx(whole[1], rel=0.05)


def test_samples_that_see_each_other_are_predicted_for_large_batches() -> None:
    study = ModelUnderStudy(Towers, in_batch_loss)
    found = profile_model(study)
    followed = profile_model(study, sizes=(2048,))
    plan = ShardingPlan(MeshPlan(dp_shard=2), (UnitPlan(("layers.*",)),))
    peaks = [estimate(each, plan, Training(2048)).peak.memory.total for each in (found, followed)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


def test_what_kernels_take_within_themselves_is_measured() -> None:
    size, channels, pixels = 4, 64, 32
    plan = ShardingPlan(MeshPlan())

    def loss(model: nn.Module, batch: int) -> torch.Tensor:
        image: torch.Tensor = model(torch.randn(batch, 3, pixels, pixels))
        return image.mean()

    conv = partial(nn.Conv2d, 3, channels, 3, padding=1)
    peak = estimate(profile_model(ModelUnderStudy(conv, loss)), plan, Training(size)).peak
    # oneDNN computes in an order of its own and copies the result.
    assert peak.memory.workspace >= size * 4 * channels * pixels**2
    linear = ModelUnderStudy(partial(Mlp, WIDTH, HIDDEN, 1), vector_loss)
    assert estimate(profile_model(linear), plan, Training(size)).peak.memory.workspace == 0


# By torch.backends.mkldnn.flags, which sets for all devices what one of them knows.
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.usefixtures("one_thread")
def test_kernels_that_need_more_for_each_sample_from_some_number_on_are_followed_further() -> None:
    def loss(model: nn.Module, batch: int) -> torch.Tensor:
        image: torch.Tensor = model(torch.randn(batch, 16, 16, 16, dtype=torch.bfloat16))
        return image.float().mean()

    conv = partial(nn.Conv2d, kernel_size=3, padding=1, dtype=torch.bfloat16)
    study = ModelUnderStudy(lambda: nn.Sequential(conv(16, 64), conv(64, 64)), loss)
    # PyTorch's own kernels are the same on all processors.
    with torch.backends.mkldnn.flags(enabled=False):
        found, few, many = (profile_model(study, sizes=sizes) for sizes in (None, (1, 2, 4), (16,)))
    by_itself, by_few, followed = (
        estimate(each, ShardingPlan(MeshPlan()), Training(16)).peak.memory.total
        for each in (found, few, many)
    )
    assert by_itself == pytest.approx(followed, rel=0.01)
    assert by_few < 0.95 * followed


def test_what_a_recurrent_kernel_keeps_for_backward_counts() -> None:
    layer = partial(nn.LSTM, 64, 64, batch_first=True)

    def loss(model: nn.Module, batch: int) -> torch.Tensor:
        output: torch.Tensor = model(torch.randn(batch, 32, 64))[0]
        return output.mean()

    profile = profile_model(ModelUnderStudy(layer, loss), sizes=(4,))
    output = 4 * 4 * 32 * 64
    held = max(each.peak.at(4) for each in profile.traces[0].segments if each.begins == "forward")
    assert held > 6 * output  # four gates, two states
    # Of inputs and of states, each four gates of 64 times 64; backward is two of forward.
    assert profile.flops.at(4) == 3 * 2 * 4 * 32 * 2 * 4 * 64 * 64


def test_a_model_that_takes_no_single_sample_is_followed_with_more() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(256, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))

    assert profile_model(ModelUnderStudy(make, vector_loss)).smallest == 2


def test_what_the_model_recomputes_by_itself_gathers_its_units() -> None:
    study = ModelUnderStudy(partial(CheckpointedMlp, WIDTH, HIDDEN, 2), vector_loss)
    steps = profile_model(study, (Conditions(), Conditions(recompute=True))).traces
    for trace in steps:
        again = [each.module for each in trace.segments if each.begins == "again"]
        assert again == ["layers.0", "layers.1"]


class Drawn(Mlp):
    """Leaves out a layer by chance."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if layer is self.layers[0] or len(x) % 2:
                x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Reentrant(Mlp):
    """Recomputes in a backward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.layers, x.requires_grad_(), use_reentrant=True)
        logits: torch.Tensor = self.head(x)
        return logits


@pytest.mark.parametrize(
    ("model", "reason"),
    [(Drawn, "does not run the same modules in every step"), (Reentrant, "use_reentrant=False")],
)
def test_a_step_that_cannot_be_followed_is_refused_with_the_reason(
    model: type[Mlp], reason: str
) -> None:
    with pytest.raises(PlanError, match=reason):
        profile_model(ModelUnderStudy(partial(model, WIDTH, HIDDEN, 2), vector_loss))


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (partial(torch.optim.AdamW, fused=True), ADAMW_FUSED),
        (partial(torch.optim.AdamW, foreach=True), OptimizerFacts(2, 4, 1, 0)),
        (partial(torch.optim.AdamW, foreach=False), OptimizerFacts(2, 4, 0, 2)),
        (partial(torch.optim.SGD, lr=0.1), SGD),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True), OptimizerFacts(1)),
        (Lion, OptimizerFacts(0, 0, 0, 1, 2.0)),
        (
            ByRows,
            OptimizerFacts(1, 0, 0, 2, matrices=MatrixState(row_bytes=4.0, column_bytes=4.0)),
        ),
        (torch.optim.Muon, OptimizerFacts(1, 0, 0, 3, matrices=MatrixState(copies=1))),
    ],
)
def test_an_optimizer_shows_what_it_keeps_and_needs(
    make: partial[torch.optim.Optimizer], facts: OptimizerFacts
) -> None:
    assert optimizer_facts(make) == facts
