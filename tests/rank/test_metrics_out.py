"""What a run measures leaves it: files beside the logs, and messages to the agent."""

import json
from collections.abc import Callable

import pytest

from services.contract.messages.rank_pipe import RankMetrics
from services.contract.specs import JobSpec
from tests.rank.gang import Trained
from tests.rank.test_any_batch import EQUAL, of

pytestmark = pytest.mark.ranks

Spec = Callable[..., JobSpec]
WITH_METRICS = EQUAL[4]


def test_rank_0_writes_each_step_and_pass_once_and_sends_what_the_loss_gave(
    trained: Trained, spec: Spec
) -> None:
    run = trained.of(of(spec, *WITH_METRICS))
    lines = [json.loads(line) for line in (run.root / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    (passed,) = [line for line in lines if "validation/loss" in line]
    assert {line["step"]: line["loss"] for line in steps} == run.losses()
    assert len(steps) == len(run.losses())
    assert steps[0].keys() >= {"hits", "largest", "samples_per_s", "learning_rate", "attempt"}
    assert passed.keys() >= {"validation/hits", "validation/largest"}
    sent = [point for message in run.of_kind(0, RankMetrics) for point in message.points]
    assert [point.step for point in sent] == [1, 2, 3, 4, 5, 6, 6]
    assert sent[0].values == {"hits": steps[0]["hits"], "largest": steps[0]["largest"]}
    assert sent[-1].values.keys() == {"validation/hits", "validation/largest"}
    assert run.of_kind(1, RankMetrics) == []
