"""The harness itself: a rank's failure is told with its traceback, and harms no later test."""

from __future__ import annotations

import os

import pytest

from tests.engine.gang import GangError, Gangs, RankContext

pytestmark = pytest.mark.ranks


def fail_on_last(ctx: RankContext, *, by_exit: bool) -> int:
    if ctx.rank == ctx.world - 1:
        if by_exit:
            os._exit(3)
        raise ZeroDivisionError("told by the rank")
    return ctx.rank


def own_rank(ctx: RankContext) -> int:
    return ctx.rank


def test_a_failure_is_raised_with_the_ranks_traceback_and_the_next_gang_is_whole(
    gangs: Gangs,
) -> None:
    with pytest.raises(GangError, match=r"(?s)rank 1 of 2:.*fail_on_last.*told by the rank"):
        gangs(2).run(fail_on_last, by_exit=False)
    with pytest.raises(GangError, match="rank 1 died"):
        gangs(2).run(fail_on_last, by_exit=True)
    assert gangs(2).run(own_rank) == [0, 1]
