"""Optimizers, their groups, schedules, averages and the scale of losses, in this process."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from fsdp_core.errors import CheckpointError
from services.contract.jobs.spec_parts import EmaSpec, Factory, OptimizerSpec, ParameterGroup
from services.worker.rank import registry
from services.worker.rank.models.decoder import Decoder
from services.worker.rank.optim.ema import Ema
from services.worker.rank.optim.groups import GroupError, by_patterns, check_options
from services.worker.rank.optim.loss_scale import MOST_IN_A_ROW, LossScale, LossScaler
from services.worker.rank.optim.optimizers import adamw, muon, sgd
from services.worker.rank.optim.own_values import (
    changed,
    own_values,
    put_back,
    put_rates_back,
    rates,
    refuse_hidden_state,
)
from services.worker.rank.optim.schedules import (
    Schedule,
    constant,
    linear,
    one_cycle,
    warmup_cosine,
    wsd,
)
from services.worker.rank.optim.several import OptimizerError, Optimizers


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def group(match: str, **options: object) -> ParameterGroup:
    return ParameterGroup.model_validate({"match": match, **options})


# -- Groups


def test_a_parameter_belongs_to_the_first_group_that_matches_it() -> None:
    model = Decoder(16, 1, 2)
    groups = [group("embedding.*", lr=0.5), group("*.weight", lr=0.1), group("*norm*", lr=9.0)]
    first, second = by_patterns(named(model), groups)
    assert [name for name, _ in first["params"]] == ["embedding.weight"]
    assert first["lr"] == 0.5
    assert len(second["params"]) == len(named(model)) - 1  # all of it is called weight


def test_without_options_of_its_own_a_group_decays_as_before() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    groups = by_patterns(named(model), [group("2.*", lr=0.5), group("1.weight", weight_decay=0.7)])
    made = adamw(groups, lr=0.1, weight_decay=0.3).param_groups
    told = [(each["lr"], each["weight_decay"], len(each["params"])) for each in made]
    assert told == [(0.1, 0.3, 1), (0.1, 0.0, 2), (0.5, 0.3, 1), (0.5, 0.0, 1), (0.1, 0.7, 1)]


def test_a_group_of_nothing_is_refused_with_close_names() -> None:
    with pytest.raises(GroupError, match=r"groups\.0\.match: 'blocks\.\*\.bais' matches no .*bias"):
        by_patterns(named(nn.ModuleDict({"blocks": nn.Linear(1, 1)})), [group("blocks.*.bais")])


def test_an_option_that_the_optimizer_lacks_is_refused() -> None:
    model = nn.Linear(2, 2)
    groups = [group("*", momentun=0.5)]
    made = sgd(by_patterns(named(model), groups))
    with pytest.raises(GroupError, match=r"optimizer\.groups\.0\.momentun: .*momentum"):
        check_options(groups, [made])
    check_options([group("*", momentum=0.5)], [made])


@pytest.mark.parametrize("wrong", [{}, {"match": ""}, {"match": 3}])
def test_a_group_needs_a_pattern(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        OptimizerSpec.model_validate({"factory": "adamw", "groups": [wrong]})


# -- Optimizers


@pytest.mark.parametrize("name", ["torch.optim:Adam", "torch.optim.Adam", "torch.optim.RMSprop"])
def test_each_class_of_torch_is_an_optimizer(name: str) -> None:
    factory = Factory(factory=name, args={"lr": 0.5})
    model = nn.Linear(2, 2)
    for over in (named(model), by_patterns(named(model), [group("bias", lr=0.25)])):
        made = registry.create("optimizer", factory, over)
        assert type(made).__name__ == name[12:]
        assert {each["lr"] for each in made.param_groups} <= {0.5, 0.25}


def test_muon_trains_the_matrices_within_and_adamw_the_rest() -> None:
    model = Decoder(16, 2, 2)
    made = Optimizers.of(muon(named(model), lr=0.1), "optimizer.factory")
    names = {parameter: name for name, parameter in named(model)}
    of = {
        each: {names[p] for g in optimizer.param_groups for p in g["params"]}
        for each, optimizer in made.by_name.items()
    }
    assert set(of) == {"muon", "adamw"}
    assert all(name.startswith("blocks.") for name in of["muon"])
    assert {"embedding.weight", "head.weight"} < of["adamw"]
    assert of["muon"] | of["adamw"] == set(names.values())
    made.set_rates(0.5)
    assert made.first_rate == 0.1
    assert {g["lr"] for each in made.by_name.values() for g in each.param_groups} == {0.05}


def test_optimizers_share_no_parameter() -> None:
    model = nn.Linear(2, 2)
    both = {"a": sgd(named(model)), "b": sgd(named(model))}
    with pytest.raises(OptimizerError, match=r"'a' and 'b' both have .*\(2, 2\)"):
        Optimizers.of(both, "optimizer.factory")
    with pytest.raises(OptimizerError, match=r"optimizer\.factory made a Linear"):
        Optimizers.of(model, "optimizer.factory")
    with pytest.raises(OptimizerError, match="no optimizer"):
        Optimizers.of({}, "optimizer.factory")
    with pytest.raises(OptimizerError, match="there is no optimizer 'c'; there are optimizer"):
        Optimizers.of(both["a"], "optimizer.factory").named("c")


def test_rates_come_back_to_groups_that_were_made_with_the_same() -> None:
    parameters = [*nn.Linear(2, 2).parameters()]

    def made(*of_groups: float) -> torch.optim.Optimizer:
        pairs = zip(parameters, of_groups, strict=True)
        return torch.optim.SGD([{"params": [each], "lr": rate} for each, rate in pairs])

    optimizer = made(0.5, 0.25)
    assert rates(optimizer, (0.5, 0.25)) == []
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.125, 0.0625
    saved = rates(optimizer, (0.5, 0.25))
    clone = made(0.5, 0.75)
    put_rates_back(clone, saved)
    assert [group["lr"] for group in clone.param_groups] == [0.125, 0.75]
    held = torch.tensor(0.5)
    put_rates_back(torch.optim.SGD([{"params": parameters, "lr": held}]), [[0.5, 0.125]])
    assert held == 0.125


def test_what_an_optimizer_counts_in_its_groups_comes_back() -> None:
    model = nn.Linear(2, 2)

    def two_groups() -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": [model.weight], "betas": (0.9, 0.9)},
            {"params": [model.bias], "seen": [0, [1]]},
        ]
        return torch.optim.SGD(groups, lr=0.1)

    optimizer = two_groups()
    first = own_values(optimizer)
    assert not any(changed(optimizer, first))
    optimizer.param_groups[0].update(lr=0.5, betas=(0.9, 0.5), weight=float("nan"))
    optimizer.param_groups[1]["nesterov"] = None
    optimizer.param_groups[1]["seen"][1].append(2)
    optimizer.param_groups[1]["size"] = torch.tensor(0.1, dtype=torch.bfloat16)
    state: dict[Any, Any] = optimizer.state
    state["made"], state["sum"] = 3, torch.tensor([0.1, float("inf")])
    saved = json.loads(json.dumps(changed(optimizer, first)))
    other = two_groups()
    put_back(other, saved)
    assert repr(own_values(other)) == repr(own_values(optimizer))
    assert other.param_groups[0]["lr"] == 0.1
    with pytest.raises(CheckpointError, match="has 1 groups of parameters, and was saved with 2"):
        put_back(torch.optim.SGD(model.parameters()), saved)
    state["sum"] = torch.zeros(2000)
    with pytest.raises(CheckpointError, match="a Tensor under 'sum', which is no parameter"):
        changed(optimizer, first)


class Around(torch.optim.Optimizer):
    """Steps by another one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, _: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # the base class overloads it
        """One update."""
        self.inner.step()


def test_an_optimizer_within_another_has_its_state_in_common_with_it_or_none() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    plain, adam = (make(model.parameters(), lr=0.1) for make in (torch.optim.SGD, torch.optim.Adam))
    for inner in (plain, adam):
        outer = Around(Around(inner))
        refuse_hidden_state([outer])
        outer.step()
        if inner is plain:
            refuse_hidden_state([outer])
            continue
        named = (
            r"Around has another one within, 'inner.inner' \(Adam\), which has a state of its own"
        )
        with pytest.raises(CheckpointError, match=named):
            refuse_hidden_state([outer])
        refuse_hidden_state([outer, inner])
        outer.state = inner.state
        refuse_hidden_state([outer])


# -- Schedules

SCHEDULES: list[Callable[[int], Schedule]] = [
    lambda _: constant(),
    lambda steps: warmup_cosine(steps // 3, steps=steps),
    lambda steps: linear(steps // 3, 0.2, steps=steps),
    lambda steps: wsd(steps // 3, steps=steps),
    lambda steps: one_cycle(steps=steps),
]


@given(st.integers(2, 5_000), st.integers(1, 6_000), st.sampled_from(SCHEDULES))
def test_a_schedule_is_a_function_of_the_step_between_0_and_1(
    steps: int, step: int, make: Callable[[int], Schedule]
) -> None:
    factor = make(steps)
    value = factor(step)
    assert 0.0 <= value <= 1.0
    factor(steps)  # what was asked before does not matter
    assert make(steps)(step) == factor(step) == value
    assert factor(steps + 7) == pytest.approx(factor(steps))


@given(st.integers(3, 500), st.data())
def test_schedules_rise_stay_and_fall(steps: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, steps - 2))
    decay = data.draw(st.integers(1, steps - warmup))
    stable = wsd(warmup, decay, 0.25, steps=steps)
    factors = [stable(step) for step in range(1, steps + 1)]
    assert factors[:warmup] == sorted(factors[:warmup])
    assert set(factors[warmup : steps - decay]) <= {1.0}
    assert factors[steps - decay :] == sorted(factors[steps - decay :], reverse=True)
    assert factors[-1] == pytest.approx(0.25)
    falling = linear(warmup, 0.25, steps=steps)
    drops = {round(falling(step) - falling(step + 1), 9) for step in range(max(warmup, 1), steps)}
    assert len(drops) == 1
    assert falling(steps) == pytest.approx(0.25)


def test_one_cycle_is_that_of_torch() -> None:
    steps = 40
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1.0, total_steps=steps, cycle_momentum=False
    )
    mine = one_cycle(steps=steps)
    for step in range(1, steps + 1):
        assert mine(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9)
        optimizer.step()
        if step < steps:
            theirs.step()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: linear(5, steps=5), "warmup_steps: 5 is not in 0..4"),
        (lambda: wsd(2, 4, steps=5), "decay_steps: 4 is not in 1..3"),
        (lambda: one_cycle(1.0, steps=5), "rise: 1.0 is not between 0 and 1"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(make: Callable[[], Schedule], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


# -- Averages


def test_averages_follow_the_weights_and_take_their_place() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad = False
    ema = Ema(model, EmaSpec(decay=0.75, every=2))
    begun = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1.0
    ema.follow(1)
    assert list(ema.tensors) == ["ema.weight"]
    assert torch.equal(ema.tensors["ema.weight"], begun)
    ema.follow(2)
    torch.testing.assert_close(ema.tensors["ema.weight"], begun + 0.25)
    weight, mean = model.weight.detach().clone(), ema.tensors["ema.weight"].clone()
    with ema.in_place_of_weights():
        assert torch.equal(model.weight, mean)
    assert torch.equal(model.weight, weight)
    assert torch.equal(ema.tensors["ema.weight"], mean)
    ema.start_over()
    assert torch.equal(ema.tensors["ema.weight"], weight)


# -- The scale of losses


def test_the_scale_is_halved_by_an_overflow_and_doubled_after_2000_steps_without() -> None:
    scale = LossScale().after(overflowed=True).after(overflowed=True)
    assert (scale.scale, scale.in_a_row, scale.skipped) == (16_384.0, 2, 2)
    for _ in range(1_999):
        scale = scale.after(overflowed=False)
    assert (scale.scale, scale.in_a_row, scale.skipped) == (16_384.0, 0, 2)
    assert scale.after(overflowed=False).scale == 32_768.0
    assert LossScale(2.0**24, clean=1_999).after(overflowed=False).scale == 2.0**24


@given(st.lists(st.booleans(), max_size=60))
def test_the_scale_is_what_torch_would_have(overflows: list[bool]) -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=65_536.0)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = LossScaler()
    for overflowed in overflows:
        theirs.scale(torch.ones(1))
        parameter.grad = torch.full((1,), torch.inf if overflowed else 1.0)
        theirs.step(optimizer)
        theirs.update()
        scaler.now = scaler.now.after(overflowed=overflowed)
        assert scaler.now.scale == theirs.get_scale()
    again = LossScaler()
    again.restore(scaler.state())
    assert again.now == scaler.now


def test_a_run_of_overflows_that_no_scale_cures_comes_to_an_end() -> None:
    scale = LossScale()
    for _ in range(MOST_IN_A_ROW):
        scale = scale.after(overflowed=True)
    assert scale.scale < 0.01
