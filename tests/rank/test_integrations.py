"""Trainers of other libraries under Meshloom: what they report, and how they go on."""

import functools
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

from services.contract.jobs.specs import JobSpec
from services.contract.messages.rank_pipe import RankVote
from tests.forking import HUGGING_FACE
from tests.rank.gang import Ranks

pytestmark = [pytest.mark.ranks, pytest.mark.system]

PROGRAMS = Path(__file__).parent / "programs"
STEPS = 6
SAMPLES = 4
SAVED = 4


def job(program: str, ranks: int, *args: int | str) -> JobSpec:
    return JobSpec.model_validate(
        {
            "entrypoint": {"script": f"{program}.py", "args": [str(each) for each in args]},
            "resources": {"ranks": ranks, "device": "cpu"},
        }
    )


@pytest.mark.parametrize(
    ("program", "world", "metric"),
    [
        ("hf_trainer", 2, "epoch"),
        ("lightning_trainer", 1, "error"),
        ("accelerate_loop", 2, "rate"),
    ],
)
def test_a_trainer_of_another_library_reports_and_goes_on_with_the_same_bits(
    ranks: Ranks, program: str, world: int, metric: str
) -> None:
    start = functools.partial(
        ranks.start,
        job(program, world, STEPS, 2),
        world,
        code=PROGRAMS,
        libraries=() if program == "lightning_trainer" else HUGGING_FACE,
    )
    first = start().succeeded()
    steps = first.steps()
    assert [(step.step, step.of) for step in steps] == [(n, STEPS) for n in range(1, STEPS + 1)]
    assert len(set(first.losses().values())) == STEPS
    if program == "hf_trainer":
        spent = [step.tokens_per_s * step.step_time_s for step in steps]
        assert spent == pytest.approx([SAMPLES] * STEPS)
    points = [json.loads(line) for line in (ranks.root / "metrics.jsonl").read_text().splitlines()]
    assert {point["step"] for point in points if metric in point} == set(range(1, STEPS + 1))

    source = first.committed(SAVED)
    again = start(fence=2, resume_from=source.checkpoint_id).succeeded()
    assert again.losses() == first.losses_after(SAVED)
    assert "not restored" not in (ranks.root / "rank-0.log").read_text()


@pytest.mark.parametrize(("every", "resumed"), [(4, [2, 4, 5]), (2, [2, 3, 6])])
def test_lightning_goes_on_with_its_callbacks_hooks_and_evaluations_within_an_epoch_and_at_its_end(
    ranks: Ranks, every: int, resumed: list[int]
) -> None:
    spec = job("lightning_callbacks", 1, 9, every)
    first = ranks.start(spec, 1, code=PROGRAMS).succeeded()
    assert [vote.step for vote in first.of_kind(0, RankVote)] == list(range(1, 10))
    sources = {saved: first.committed(saved).checkpoint_id for saved in resumed}
    for fence, (saved, source) in enumerate(sources.items(), start=2):
        again = ranks.start(spec, 1, fence=fence, resume_from=source, code=PROGRAMS).succeeded()
        assert again.losses() == first.losses_after(saved)
        evaluated = _metric(ranks, "far")
        after = {step: far for step, far in evaluated[fence].items() if step > max(saved, 4)}
        assert after == {step: far for step, far in evaluated[1].items() if step in after}
        assert 9 in after


@pytest.mark.parametrize(
    ("kind", "saved", "resumed"),
    [
        ("automatic", list(range(1, 9)), [2, 3, 4, 8]),
        ("manual", list(range(1, 9)), [3, 5]),
        ("stream", [4, 8], [4]),
        ("twice", list(range(1, 9)), [3, 6]),
        ("older", list(range(1, 9)), [4]),
    ],
)
def test_lightning_goes_on_with_what_is_done_behind_callbacks_and_ends_where_it_did(
    ranks: Ranks, kind: str, saved: list[int], resumed: list[int]
) -> None:
    spec = job("lightning_behind", 1, kind)
    first = ranks.start(spec, 1, code=PROGRAMS).succeeded()
    assert sorted(first.losses()) == list(range(1, 9))
    assert [vote.step for vote in first.of_kind(0, RankVote)] == saved
    sources = {step: first.committed(step).checkpoint_id for step in resumed}
    for fence, (step, source) in enumerate(sources.items(), start=2):
        again = ranks.start(spec, 1, fence=fence, resume_from=source, code=PROGRAMS).succeeded()
        assert again.losses_after(step) == first.losses_after(step)
        weights = _metric(ranks, "weights")
        assert weights[fence][8] == weights[1][8]


def _metric(ranks: Ranks, name: str) -> Mapping[int, Mapping[int, float]]:
    """What was reported by a name, by attempt and step."""
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for line in (ranks.root / "metrics.jsonl").read_text().splitlines():
        point = json.loads(line)
        if name in point:
            found[point["attempt"]][point["step"]] = point[name]
    return found


@pytest.mark.parametrize(
    ("steps", "every", "last", "saved"),
    [(9, 1, 6, [1, 2, 3, 4, 5, 6]), (9, 4, 6, [4, 6]), (4, 9, 4, [4])],
)
def test_transformers_goes_on_with_its_callbacks_and_what_follows_evaluations_and_ends_where_it_did(
    ranks: Ranks, steps: int, every: int, last: int, saved: list[int]
) -> None:
    spec = job("hf_callbacks", 1, steps, every)
    start = functools.partial(ranks.start, spec, 1, code=PROGRAMS, libraries=HUGGING_FACE)
    first = start().succeeded()
    assert max(first.losses()) == last  # evaluations have it stopped, or all steps are made
    assert [vote.step for vote in first.of_kind(0, RankVote)] == saved
    sources = {step: first.committed(step).checkpoint_id for step in saved if step > 1}
    for fence, (step, source) in enumerate(sources.items(), start=2):
        again = start(fence=fence, resume_from=source).succeeded()
        assert again.losses_after(step) == first.losses_after(step)


def test_what_callbacks_of_lightning_have_on_other_ranks_alone_is_that_of_the_first(
    ranks: Ranks,
) -> None:
    spec = job("lightning_ranks", 2, 4)
    first = ranks.start(spec, 2, code=PROGRAMS).succeeded()
    source = first.committed(2)
    again = ranks.start(
        spec, 2, fence=2, resume_from=source.checkpoint_id, code=PROGRAMS
    ).succeeded()
    assert again.losses() == first.losses_after(2)
