"""What is shown of a job while it is followed, on a terminal and where there is none."""

import io

from rich.console import Group

from services.cli.follow import plain_lines, rank_rows
from services.cli.terminal import Terminal
from services.contract.api.views import Progress, RankList
from services.contract.words.states import JobState
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


def test_without_a_terminal_a_job_that_waits_is_told_once_and_progress_every_five_seconds() -> None:
    nobody = RankList(attempt=0, items=())
    seconds = iter(range(1_000))
    waits = views.job(
        state=JobState.QUEUED, reason="waits for 2 slots", progress=Progress(step=0, of=None)
    )
    waits_on = waits.model_copy(update={"reason": "waits for 1 slot"})
    steps = [
        views.job(
            state=JobState.RUNNING, reason=None, progress=Progress(step=n, of=30, tokens_per_s=9)
        )
        for n in range(1, 20)
    ]
    observed = [(job, nobody) for job in [waits] * 40 + [waits_on] * 40 + steps]
    told = list(plain_lines(observed, lambda: float(next(seconds))))
    assert told[:3] == [
        "QUEUED (waits for 2 slots)",
        "QUEUED (waits for 1 slot)",
        "RUNNING step 1/30 loss -  9 tokens/s  eta -",
    ]
    assert 1 < len(told[3:]) <= 5
    assert all(line.startswith("RUNNING step ") for line in told[3:])
