"""Layouts that a plan chooses, beside the default and others, as two CPU ranks really take them.

    python -m benchmarks.planner_choice [--models digits vit] [--seconds 25]

For each model the node measures itself once, the model is profiled as a probe does it, and the
search chooses. Then the chosen layout, the default (all ranks in dp_shard, one unit, a rank's
whole share of the batch at once) and some of the others train in turns, a step each. A figure is
the lower quartile of a layout's steps, on the slower rank.

`chosen/default` and `chosen/best` compare measured seconds; `order` is Spearman's correlation of
estimated and measured seconds over the layouts; `estimated/taken` is that of the chosen one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, cast

import torch
import torch.distributed as dist

from benchmarks.varied_models import VARIED, Varied
from fsdp_core import FSDPModule, clip_grad_norm_
from fsdp_core.comm.collectives import GroupCollectives
from fsdp_core.plan.apply import apply_plan
from fsdp_core.plan.model import (
    ADAMW_FUSED,
    Candidate,
    Conditions,
    LayoutQuestion,
    MeshPlan,
    ModelProfile,
    NodeFacts,
    Seats,
    ShardingPlan,
    Workload,
    conditions_for,
    estimate,
    search_layout,
)
from fsdp_core.plan.model.space import LayoutSpace
from fsdp_core.plan.profiling import profile_model
from fsdp_core.plan.study import ModelUnderStudy
from services.worker.rank.probe.measuring import MeasuringRank, node_facts
from tests.engine.gang import Gangs, RankContext
from tests.plan.suite import _mesh

RANKS = 2
MEMORY = 4 << 30
OTHERS = 6
WARM_STEPS = 2
LEAST_ROUNDS, MOST_ROUNDS = 5, 60


class Layout(TypedDict):
    """What a rank needs to train by a layout."""

    plan: ShardingPlan
    micro_batch: int
    passes: int


def main() -> None:
    """Prints a row for each model, then medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(VARIED), default=list(VARIED))
    parser.add_argument("--seconds", type=float, default=25.0, help="of training for each model")
    parser.add_argument("--verbose", action="store_true", help="every layout")
    parser.add_argument("--keep", type=Path, help="append each model's figures to a file of JSON")
    chosen = parser.parse_args()
    gangs = Gangs("cpu")
    facts = gangs(RANKS).run(measured_node)[0]
    _print(f"load of {os.cpu_count()} processors: {os.getloadavg()[0]:.1f}")
    _print(
        f"{'model':<12}{'chosen':<34}{'ms':>8}{'default':>9}{'best':>8}{'chosen/default':>16}"
        f"{'chosen/best':>13}{'order':>7}{'estimated/taken':>16}"
    )
    rows = [
        _row(gangs, facts, name, chosen.seconds, verbose=chosen.verbose) for name in chosen.models
    ]
    if chosen.keep:
        with chosen.keep.open("a") as kept:
            kept.writelines(json.dumps(row) + "\n" for row in rows)
    _print(
        f"{'median':<12}{'':<59}{_median(rows, 'of_default'):>16.2f}"
        f"{_median(rows, 'of_best'):>13.2f}{_median(rows, 'order'):>7.2f}"
        f"{_median(rows, 'estimated'):>16.2f}"
    )
    _print(
        f"at worst {max(row['of_default'] for row in rows):.2f} of the default, "
        f"{max(row['of_best'] for row in rows):.2f} of the best"
    )
    gangs.close()


class Row(TypedDict):
    """A model's figures."""

    model: str
    of_default: float
    of_best: float
    order: float
    estimated: float


def _row(gangs: Gangs, facts: NodeFacts, name: str, seconds: float, *, verbose: bool) -> Row:
    known = VARIED[name]
    plan = ShardingPlan(MeshPlan(dp_shard=RANKS), shared_memory="auto")  # as jobs have it
    default = (plan, known.batch // RANKS)
    question = LayoutQuestion(
        Seats(RANKS, RANKS, MEMORY, facts),
        Workload(known.batch, ADAMW_FUSED, shared_memory="auto"),
        default=default,
    )
    profile = profiled(known, conditions_for(question))
    best = search_layout(profile, question).best
    assert best is not None  # noqa: S101 - the batch divides
    space = LayoutSpace(profile, question)
    every = [(space.plan(each), space.training(each)) for each in space.layouts()]
    costs = {
        (plan, training.micro_batch): (estimate(profile, plan, training, facts), training)
        for plan, training in every
    }
    estimated = {key: cost.time.total for key, (cost, _) in costs.items() if cost.time}
    taken_first = [(best.plan, best.micro_batch), default]
    rest = sorted((key for key in estimated if key not in taken_first), key=lambda k: estimated[k])
    spread = (
        [rest[round(n * (len(rest) - 1) / (OTHERS - 1))] for n in range(OTHERS)] if rest else []
    )
    keys = list(dict.fromkeys([*taken_first, *spread]))
    layouts = [
        Layout(plan=plan, micro_batch=size, passes=costs[plan, size][1].accumulation)
        for plan, size in keys
    ]
    by_rank = gangs(RANKS).run(trained, name, layouts, seconds)
    took = dict(zip(keys, (max(each) for each in zip(*by_rank, strict=True)), strict=True))
    mine = took[taken_first[0]]
    fastest = min(took.values())
    row = Row(
        model=name,
        of_default=mine / took[default],
        of_best=mine / fastest,
        order=_spearman([estimated[key] for key in keys], [took[key] for key in keys]),
        estimated=estimated[taken_first[0]] / mine,
    )
    _print(
        f"{name:<12}{_title(best):<34}{1e3 * mine:>8.1f}{1e3 * took[default]:>9.1f}"
        f"{1e3 * fastest:>8.1f}{row['of_default']:>16.2f}{row['of_best']:>13.2f}"
        f"{row['order']:>7.2f}{row['estimated']:>16.2f}"
    )
    if verbose:
        _print(f"    {profile.timed}")
        for key in sorted(keys, key=lambda key: took[key]):
            cost, training = costs[key]
            one = Candidate(*key, training.accumulation, cost, fits=True)
            time_ = cost.time
            assert time_ is not None  # noqa: S101 - the node is known
            parts = {"": time_.compute, "e": time_.engine, "o": time_.optimizer}
            parts |= {axis: s for axis, s in time_.communication.items() if s}
            words = " ".join(f"{k}{1e3 * v:.2f}" for k, v in parts.items())
            _print(
                f"    {_title(one):<40}{1e3 * took[key]:>9.2f}{1e3 * estimated[key]:>9.2f}  {words}"
            )
    return row


def profiled(known: Varied, conditions: Sequence[Conditions]) -> ModelProfile:
    """As a probe does it."""
    return profile_model(ModelUnderStudy(known.make, known.loss), conditions, timed_within=MEMORY)


def measured_node(ctx: RankContext) -> NodeFacts:
    """What the node's self-test finds, with these ranks at work."""
    group = GroupCollectives("host", cast("dist.ProcessGroup", dist.group.WORLD))
    return node_facts(
        MeasuringRank(ctx.rank, "cpu", ctx.device, group, group), ctx.world, ctx.world
    )


def trained(ctx: RankContext, name: str, layouts: Sequence[Layout], seconds: float) -> list[float]:
    """Seconds of a step by each layout, taken in turns."""
    warnings.simplefilter("ignore")
    runs = [_Run(ctx, VARIED[name], layout) for layout in layouts]
    times: list[list[float]] = [[] for _ in runs]
    order, ends = list(range(len(runs))), time.perf_counter() + seconds
    dice = random.Random(0)  # noqa: S311 - the same on all ranks
    for number in range(WARM_STEPS + MOST_ROUNDS):
        dice.shuffle(order)
        for place in order:
            took = runs[place].step()
            if number >= WARM_STEPS:
                times[place].append(took)
        over = torch.tensor(float(time.perf_counter() > ends))
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
        if over and number >= WARM_STEPS + LEAST_ROUNDS:
            break
    return [statistics.quantiles(each, n=4)[0] for each in times]


class _Run:
    """One layout's model, and how it trains: as `services.worker.rank.loop.step` does."""

    def __init__(self, ctx: RankContext, known: Varied, layout: Layout) -> None:
        torch.manual_seed(0)
        self._known, self._layout = known, layout
        self._model = known.make()
        apply_plan(self._model, layout["plan"], _mesh(ctx, layout["plan"].mesh))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)

    def step(self) -> float:
        dist.barrier()
        began = time.perf_counter()
        passes = self._layout["passes"]
        for number in range(1, passes + 1):
            cast("FSDPModule", self._model).set_requires_gradient_sync(number == passes)
            loss = self._known.loss(self._model, self._layout["micro_batch"]) / passes
            torch.autograd.backward(loss)
        clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - began


def _title(candidate: Candidate) -> str:
    mesh, units = candidate.plan.mesh, candidate.plan.units
    words = [f"{mesh.dp_replicate} x {mesh.dp_shard}"]
    words.append(f"{candidate.micro_batch} x {candidate.accumulation}")
    words.append("one unit" if not units else f"{len(units)} patterns")
    if any(unit.recompute for unit in units):
        words.append("again")
    if any(unit.reshard_after_forward is False for unit in units):
        words.append("kept")
    return ", ".join(words)


def _spearman(left: Sequence[float], right: Sequence[float]) -> float:
    if len(left) < 3:  # noqa: PLR2004 - two are either in order or not
        return 1.0
    ranks = ([sorted(each).index(value) for value in each] for each in (left, right))
    return statistics.correlation(*(list(map(float, each)) for each in ranks))


def _median(rows: Sequence[Row], name: str) -> float:
    return statistics.median(float(row[name]) for row in rows)  # type: ignore[literal-required]  # one of its keys


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
