"""CPU ranks of a job share memory: by default, as their plan says, and with the same losses."""

from collections.abc import Callable
from pathlib import Path

import pytest

from services.contract.jobs.specs import JobSpec
from services.contract.messages.rank_pipe import RankMetrics
from tests.rank.gang import Attempt, Ranks

pytestmark = pytest.mark.ranks

Spec = Callable[..., JobSpec]

USER = "tests.rank.user_models"
TWO = {"resources": {"ranks": 2}, "mesh": {"dp_shard": 2}}
COUNTED = {"loss": {"factory": f"{USER}:counting_segments"}}


def segments(attempt: Attempt) -> int:
    """That a rank of it had mapped in its first step."""
    (told, *_) = attempt.of_kind(0, RankMetrics)
    return int(told.points[0].values["segments"] or 0)


def test_by_default_they_share_storage_and_the_losses_are_those_of_gloo_bit_for_bit(
    ranks: Ranks, spec: Spec
) -> None:
    runs = {
        way: ranks.start(spec(**TWO, **COUNTED, plan=plan), fence=fence).succeeded()
        for fence, (way, plan) in enumerate(
            (
                ("default", {}),
                ("none", {"shared_memory": "none"}),
                ("copy", {"shared_memory": "copy"}),
                ("storage", {"shared_memory": "storage"}),
            ),
            start=1,
        )
    }
    assert segments(runs["none"]) == 0
    assert 0 < segments(runs["copy"]) < segments(runs["storage"]) == segments(runs["default"])
    for run in runs.values():
        assert run.losses() == runs["none"].losses()


def test_what_is_cast_is_copied(ranks: Ranks, spec: Spec) -> None:
    train = {"precision": {"params": "bf16", "reduce": "fp32"}}
    runs = [
        ranks.start(spec(**TWO, **COUNTED, train=train, plan=plan), fence=fence).succeeded()
        for fence, plan in enumerate(
            ({}, {"shared_memory": "copy"}, {"shared_memory": "none"}), start=1
        )
    ]
    default, copied, by_gloo = map(segments, runs)
    assert default == copied > by_gloo == 0
    assert runs[0].losses() == runs[1].losses() == runs[2].losses()


def test_a_forward_that_writes_a_parameter_writes_its_own_copy(ranks: Ranks, spec: Spec) -> None:
    runs = [
        ranks.start(
            spec(
                model={"factory": f"{USER}:Renormed", "args": {"dim": 16}},
                plan={"units": [{"modules": ["head"]}], **said},
                **TWO,
                **COUNTED,
            ),
            fence=fence,
        ).succeeded()
        for fence, said in enumerate(({}, {"shared_memory": "none"}), start=1)
    ]
    assert segments(runs[0]) > segments(runs[1]) == 0
    assert runs[0].losses() == runs[1].losses()


def test_nobody_exchanges_averages_while_another_is_evaluated(
    ranks: Ranks, spec: Spec, library: Path, tmp_path: Path
) -> None:
    """With one copy of the parameters it would write what the other computes with."""
    watched = spec(
        model={"factory": f"{USER}:Watched", "args": {"folder": str(tmp_path), "dim": 16}},
        data={
            "args": {
                "seq_len": 16,
                "library": str(library),
                "validation_sequences": 4,
                "validation_batch": 2,
            }
        },
        train={"steps": 3, "ema": {"decay": 0.5}},
    )
    ranks.start(watched, units=()).succeeded()
