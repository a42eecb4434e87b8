"""What a profiler and the log see of a step."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fsdp_core import MixedPrecisionPolicy
from fsdp_core.runtime.observer import UnitTracer
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import Decoder, loss_of, tokens_of
from tests.engine.sharded import backward_once, shard_decoder

pytestmark = pytest.mark.ranks


def test_a_profile_names_the_phases_of_every_unit(gangs: Gangs) -> None:
    gangs(2).run(check_profile)


def check_profile(ctx: RankContext) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16)
    model = shard_decoder(ctx, policy=policy)
    backward_once(ctx, model)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        backward_once(ctx, model, 1)
    counts: dict[str, int] = {}
    for event in recorded.events() or []:
        counts[event.name] = counts.get(event.name, 0) + 1
    assert counts["FSDP::root_pre_forward"] == 1
    assert counts["FSDP::root_post_backward_callback"] == 1
    assert counts["FSDP::all_gather"] == 1  # the root stays whole between forward and backward
    for block in ("blocks.0", "blocks.1", "blocks.2"):
        for phase, times in {
            "pre_forward": 1,
            "post_forward": 1,
            "pre_backward": 1,
            "post_backward": 1,
            "post_backward_reshard": 1,
            "post_backward_rs_wait": 1,
            "post_backward_reduce": 1,
            "all_gather": 2,
            "all_gather_copy_out": 2,
            "cast_forward_inputs": 1,
            "cast_forward_outputs": 1,
        }.items():
            assert counts.get(f"FSDP::{phase} ({block})") == times, (phase, block)
    assert counts["FSDP::forward_prefetch (blocks.1)"] == 1
    assert counts["FSDP::backward_prefetch (blocks.1)"] == 1


def test_two_passes_before_a_backward_both_gather_ahead(gangs: Gangs) -> None:
    """The second finds the root whole, as its parameters stay so until it has gone backward."""
    gangs(2).run(check_two_passes)


def check_two_passes(ctx: RankContext) -> None:
    model = shard_decoder(ctx)
    forward_twice(ctx, model)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        forward_twice(ctx, model)
    names = [event.name for event in recorded.events() or []]
    assert [names.count(f"FSDP::forward_prefetch (blocks.{n})") for n in range(3)] == [1, 2, 2]


def forward_twice(ctx: RankContext, model: Decoder) -> None:
    with torch.no_grad():
        loss_of(model, tokens_of(0, ctx.rank).to(ctx.device))
    backward_once(ctx, model)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_the_log_tells_phases_at_level_debug_only(gangs: Gangs) -> None:
    gangs(2).run(check_log)


def check_log(ctx: RankContext) -> None:
    model = shard_decoder(ctx)
    logger, handler = logging.getLogger("fsdp_core"), Lines()
    logger.addHandler(handler)
    backward_once(ctx, model)
    assert handler.lines == []
    logger.setLevel(logging.DEBUG)
    backward_once(ctx, model)
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)
    order = [
        "FSDP::root_pre_forward",
        "FSDP::pre_forward",
        "FSDP::pre_forward (blocks.0)",
        "FSDP::post_forward (blocks.0)",
        "FSDP::pre_forward (blocks.1)",
        "FSDP::post_forward (blocks.2)",
        "FSDP::post_forward",
        "FSDP::pre_backward",
        "FSDP::pre_backward (blocks.2)",
        "FSDP::post_backward (blocks.2)",
        "FSDP::post_backward (blocks.0)",
        "FSDP::root_post_backward_callback",
    ]
    positions = [handler.lines.index(line) for line in order]
    assert positions == sorted(positions)


def test_without_a_profiler_every_span_is_the_same_empty_one() -> None:
    tracer = UnitTracer()
    assert tracer.span("all_gather") is tracer.span("pre_forward")
    with profile(activities=[ProfilerActivity.CPU]):
        assert tracer.span("all_gather") is not tracer.span("pre_forward")
