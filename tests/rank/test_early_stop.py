"""Runs that end because their evaluations get no better."""

import shutil
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contract.jobs.spec_parts import EarlyStopSpec
from services.contract.jobs.specs import JobSpec
from services.contract.messages.rank_pipe import RankEvaluated, RankFinished, RankVote
from services.contract.storage.commit_chain import CommitChain
from services.contract.words.ids import checkpoint_id, new_job_id
from services.worker.rank.loop.early_stop import (
    Course,
    EarlyStop,
    MetricChoiceError,
    check_validation,
    chosen_figure,
)
from tests.rank.gang import JOB, Attempt, Ranks, Trained

Spec = Callable[..., JobSpec]
# No evaluation is better than the first one by so much: the run ends after evaluations 1 + 2.
HOPELESS = {"patience": 2, "min_delta": 100.0}
TRAIN = {"steps": 12, "eval_every": 2, "early_stop": HOPELESS}
SAVED = {"every_steps": 2}


def ends(attempt: Attempt) -> list[tuple[int, bool, bool]]:
    """Of each rank: its last step, whether it drained, and whether it was done early."""
    said = [attempt.of_kind(rank, RankFinished)[0] for rank in range(2)]
    return [(end.step, end.drained, end.early is not None) for end in said]


@pytest.mark.ranks
def test_all_ranks_end_at_the_step_at_which_evaluations_got_no_better(
    trained: Trained, spec: Spec
) -> None:
    run = trained.of(spec(train=TRAIN, checkpoint=SAVED))
    assert ends(run) == [(6, False, True)] * 2
    (end,) = run.of_kind(0, RankFinished)
    best = run.of_kind(0, RankEvaluated)[0].loss
    assert end.early == (
        "stopped early: validation loss did not improve in 2 evaluations in a row "
        f"(the best is {best:.6g} of step 2)"
    )
    # Its end is saved, with the figures of its evaluation, and its steps are those of a longer run.
    votes = {vote.step: vote for vote in run.of_kind(1, RankVote)}
    assert set(votes) == {2, 4, 6}
    assert votes[2].evaluation == {"loss": best}
    whole = trained.of(spec(train={"steps": 12, "eval_every": 2}, checkpoint=SAVED))
    assert run.losses() == {k: v for k, v in whole.losses().items() if k <= 6}


@pytest.mark.ranks
@pytest.mark.parametrize("step", [4, 6])
def test_a_resumed_run_ends_at_the_same_step(
    trained: Trained, ranks: Ranks, spec: Spec, step: int
) -> None:
    wanted = spec(train=TRAIN, checkpoint=SAVED)
    manifest = trained.committed(step, ranks, wanted)
    again = ranks.start(wanted, fence=2, resume_from=manifest.checkpoint_id).succeeded()
    assert ends(again) == [(6, False, True)] * 2
    assert set(again.losses()) == set(range(step + 1, 7))


@pytest.mark.ranks
def test_a_clone_counts_evaluations_of_its_own(trained: Trained, ranks: Ranks, spec: Spec) -> None:
    wanted = spec(train=TRAIN, checkpoint=SAVED)
    manifest = trained.committed(6, ranks, wanted)
    other = new_job_id(1_700_000_000_000, bytes(9) + b"\1")
    name = checkpoint_id(other, 6, 1)
    chain = CommitChain(ranks.root, other)
    saved = CommitChain(ranks.root, JOB).shard_folder(manifest.checkpoint_id)
    shutil.copytree(saved, chain.shard_folder(name))
    chain.append(manifest.model_copy(update={"job_id": other, "checkpoint_id": name}))
    clone = ranks.start(wanted, fence=2, resume_from=name).succeeded()
    assert ends(clone) == [(12, False, False)] * 2


def stops(values: Sequence[float], wanted: EarlyStopSpec) -> int | None:
    """After which evaluation a run ends."""
    stop = EarlyStop(wanted)
    for number, value in enumerate(values, start=1):
        stop.note(number, {wanted.metric: value})
        if stop.reason is not None:
            return number
    return None


VALUES = st.lists(st.integers(-6, 6).map(float) | st.just(float("nan")), max_size=20)


@given(VALUES, st.integers(1, 4), st.integers(0, 2), st.sampled_from(["min", "max"]))
def test_a_run_ends_after_so_many_evaluations_since_the_best_one(
    values: list[float], patience: int, delta: int, mode: str
) -> None:
    wanted = EarlyStopSpec.model_validate(
        {"metric": "f1", "mode": mode, "patience": patience, "min_delta": delta}
    )
    sign = -1.0 if mode == "max" else 1.0
    records: list[int] = []  # evaluations that were better than all that counted before
    best = float("inf")
    for number, value in enumerate(values):
        if sign * value < best - (delta if records else 0):
            best = sign * value
            records.append(number)
    ended = [
        number
        for number in range(len(values))
        if number - max([each for each in records if each <= number], default=-1) >= patience
    ]
    assert stops(values, wanted) == (ended[0] + 1 if ended else None)


def test_its_course_goes_on_from_a_checkpoint_but_not_by_another_metric() -> None:
    wanted = EarlyStopSpec(patience=3)
    stop = EarlyStop(wanted)
    for step, loss in enumerate([3.0, 2.0, 2.5], start=1):
        stop.note(step, {"loss": loss, "f1": 0.5})
    again = EarlyStop(wanted)
    again.restore(stop.state())
    assert again.course == stop.course == Course(2.0, 2, 1)
    other = EarlyStop(EarlyStopSpec(patience=3, metric="f1", mode="max"))
    other.restore(stop.state())
    assert other.course == Course()


def test_a_metric_that_no_evaluation_has_is_named_with_those_that_it_has(spec: Spec) -> None:
    with pytest.raises(MetricChoiceError, match=r"keep_best\.metric: .* accuracy, loss, and no f1"):
        chosen_figure({"loss": 1.0, "accuracy": 0.5}, "f1", "checkpoint.keep_best")
    with pytest.raises(MetricChoiceError, match=r"train\.early_stop: .* no validation part"):
        check_validation(spec(train=TRAIN), lambda: ())
    check_validation(spec(), lambda: ())
    with pytest.raises(ValueError, match=r"set train\.eval_every"):
        spec(train={"early_stop": HOPELESS})
