"""Where ranks stand, told while they run: who is late, who hangs and why."""

from collections.abc import Sequence

import pytest

from services.contract.views import RankView
from tests.e2e.conftest import Stack
from tests.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.redis]

ENDLESS = {"train": {"steps": 1_000_000, "global_batch": 4, "seed": 7}}


def test_a_rank_that_computes_slower_is_named_by_its_lateness_not_by_its_step_time(
    stack: Stack,
) -> None:
    job_id = stack.submit(
        **ENDLESS, model={"factory": "troubled_models:SlowOnRankOne"}, name="slow"
    ).id

    def named() -> Sequence[RankView] | None:
        ranks = stack.client.ranks(job_id).items
        return ranks if any(rank.is_straggler for rank in ranks) else None

    try:
        first, second = until(named, timeout_s=120)
    finally:
        stack.client.kill(job_id)
    assert (first.is_straggler, second.is_straggler) == (False, True)
    assert (second.arrival_lag_s or 0) > (first.arrival_lag_s or 0)
    assert (second.straggler_score or 0) > (first.straggler_score or 0)
    assert first.step_time_s == pytest.approx(second.step_time_s, rel=0.9)
