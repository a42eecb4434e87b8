"""The live view of a job with more ranks than the terminal has lines."""

import io

from rich.console import Group

from services.cli.follow import rank_rows
from services.cli.terminal import Terminal
from services.contract.api.views import RankList
from tests.cli import views


def _shown(ranks: RankList, height: int) -> list[str]:
    screen = io.StringIO()
    Terminal(file=screen, width=100, soft_wrap=True).print(Group(*rank_rows(ranks, height)))
    return screen.getvalue().splitlines()


def test_of_many_ranks_those_are_shown_that_the_others_wait_for() -> None:
    (rank, _) = views.ranks().items
    usual = {"is_straggler": False, "straggler_score": 0.0}
    many = [rank.model_copy(update=usual | {"rank": n, "node_id": "loom-1"}) for n in range(4_096)]
    many[3_000] = many[3_000].model_copy(update={"is_straggler": True, "straggler_score": 0.5})
    many[17] = many[17].model_copy(update={"step": 5})
    lines = _shown(RankList(attempt=1, items=tuple(many)), height=24)
    assert len(lines) <= 24
    shown = [line.split()[0] for line in lines[2:-1]]
    assert {"17", "3000"} <= set(shown)
    assert shown == sorted(shown, key=int)
    assert (
        lines[-1] == f"and {4_096 - len(shown)} more; these are the ones that the others wait for"
    )
    few = _shown(RankList(attempt=1, items=tuple(many[:2])), height=24)
    assert [line.split()[0] for line in few[2:]] == ["0", "1"]
    assert _shown(RankList(attempt=0, items=()), height=24) == []
