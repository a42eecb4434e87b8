"""Ranks train: what they compute, tell and agree on."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_core.plan.model import UnitPlan
from services.contract.jobs.specs import JobSpec
from services.contract.messages.rank_pipe import (
    RankEvaluated,
    RankFailed,
    RankFinished,
    RankReady,
    RankVote,
)
from services.contract.words.states import RankPhase
from tests.rank.gang import Ranks, Trained
from tests.waiting import until

pytestmark = pytest.mark.ranks

Spec = Callable[..., JobSpec]

USER = "tests.rank.user_models"
COMPILING = "tests.rank.eagerly_compiling_trainer:train"


def test_two_ranks_train_and_tell_the_same_falling_loss(trained: Trained, spec: Spec) -> None:
    attempt = trained.of(spec())
    losses = attempt.losses(0)
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    assert losses == attempt.losses(1)
    assert 5.3 < losses[1] < 5.8
    assert losses[6] < losses[1]
    ready = attempt.of_kind(0, RankReady)[0]
    assert ready.units == ("root", "blocks.0", "blocks.1")
    assert ready.groups == ("dp_shard", "control")
    assert attempt.of_kind(1, RankFinished) == [RankFinished(step=6, drained=False)]
    (evaluation,) = attempt.of_kind(0, RankEvaluated)
    assert evaluation.step == 6
    assert evaluation.tokens == 6 * 16
    assert set(evaluation.baselines) == {"bigram", "unigram"}
    assert attempt.of_kind(1, RankEvaluated) == []
    assert "validation loss" in (attempt.root / "rank-0.log").read_text(encoding="utf-8")


@pytest.mark.parametrize("world", [1, 3, 4])
def test_the_number_of_ranks_does_not_show_in_the_losses(
    trained: Trained, spec: Spec, world: int
) -> None:
    two = trained.of(spec()).losses()
    other = trained.of(spec(), world).losses()
    # The first is made of first values alone: only the order of its sums may differ.
    assert other[1] == pytest.approx(two[1], abs=2e-6)
    assert other == pytest.approx(two, abs=1e-5)


def test_a_process_that_user_code_forks_does_not_end_its_rank(ranks: Ranks, spec: Spec) -> None:
    model = {"factory": f"{USER}:Forking", "args": {}}
    attempt = ranks.start(spec(model=model), units=()).succeeded()
    assert sorted(attempt.losses()) == [1, 2, 3, 4, 5, 6]
    for rank in range(2):
        assert attempt.of_kind(rank, RankFailed) == []


@pytest.mark.parametrize("kind", ["none", "closed", "of its own"])
def test_outputs_that_user_code_has_replaced_end_no_rank(
    ranks: Ranks, spec: Spec, kind: str
) -> None:
    model = {"factory": f"{USER}:Unheard", "args": {"kind": kind}}
    attempt = ranks.start(spec(model=model), units=()).succeeded()
    assert sorted(attempt.losses()) == [1, 2, 3, 4, 5, 6]


def test_units_that_are_compiled_train_as_eager_ones(
    trained: Trained, ranks: Ranks, spec: Spec
) -> None:
    units = (UnitPlan(("blocks.*",), compile=True),)
    attempt = ranks.start(spec(), units=units, trainer=COMPILING).succeeded()
    assert attempt.losses() == pytest.approx(trained.of(spec()).losses(), abs=1e-5)
    log = (ranks.root / "rank-0.log").read_text(encoding="utf-8")
    assert int(re.findall(r"graphs: (\d+)", log)[0]) > 0


def test_micro_batches_only_change_the_order_of_sums(
    trained: Trained, ranks: Ranks, spec: Spec
) -> None:
    whole = trained.of(spec())
    train = {"steps": 6, "global_batch": 12, "seed": 7, "micro_batch": 2}
    split = ranks.start(spec(train=train), fence=2).succeeded()
    assert split.losses() == pytest.approx(whole.losses(), abs=1e-5)
    norms = [step.grad_norm for step in split.steps()]
    assert norms == pytest.approx([step.grad_norm for step in whole.steps()], rel=1e-4)


@pytest.mark.ranks
def test_gradients_of_what_no_optimizer_has_do_not_add_up(trained: Trained, spec: Spec) -> None:
    of_head = {"factory": "tests.rank.user_optimizers:of_the_head", "args": {"lr": 0.0}}
    of_all = {"factory": "sgd", "args": {"lr": 0.0}}
    norms = [
        [step.grad_norm for step in trained.of(spec(optimizer=each)).steps()]
        for each in (of_head, of_all)
    ]
    assert norms[0] == norms[1]


def test_the_board_tells_figures_and_counts_of_every_step(trained: Trained, spec: Spec) -> None:
    attempt = trained.of(spec())
    steps = attempt.steps(1)
    assert [round(step.learning_rate, 6) for step in steps[:3]] == [0.005, 0.01, 0.008682]
    assert all(step.step_time_s > 0 and step.tokens_per_s > 0 for step in steps)
    assert all(0 < step.data_wait_s < step.step_time_s for step in steps)
    assert all(step.memory_bytes > 50_000_000 for step in steps)
    # The clocks of steps are as far apart as the steps are long; both are read to the millisecond.
    ended = [step.ended_ms for step in steps]
    assert all(
        after - before >= 1_000 * step.step_time_s - 1
        for before, after, step in zip(ended, ended[1:], steps[1:], strict=False)
    )
    first, second = attempt.board(0).read(), attempt.board(1).read()
    assert first is not None
    assert second is not None
    assert first.phase.name == "FINISHED"
    # All that the process holds, and what training took of it: the model is tiny.
    assert 0 < first.peak_bytes < 50_000_000 < first.memory_bytes
    assert first.issued == first.completed == second.issued
    assert min(first.issued[:2]) >= 6


def test_the_board_tells_from_outside_where_a_rank_hangs(
    ranks: Ranks, spec: Spec, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    model = {"factory": f"{USER}:HeldUp", "args": {"fifo": str(fifo)}}
    job = spec(model=model, train={"steps": 1}, schedule={"factory": "constant", "args": {}})
    attempt = ranks.start(job)
    attempt.until(lambda: all(attempt.of_kind(rank, RankReady) for rank in (0, 1)))
    unit = attempt.of_kind(0, RankReady)[0].units.index("blocks.1")

    def hangs() -> bool:
        held = attempt.board(0).read()
        return held is not None and (held.phase, held.unit_index) == (RankPhase.FORWARD, unit)

    until(hangs)
    other = attempt.board(1).read()
    assert other is not None
    assert other.step == 0
    fifo.write_text("go on", encoding="utf-8")
    attempt.succeeded()


def test_a_stop_order_to_one_rank_drains_all_at_one_step(ranks: Ranks, spec: Spec) -> None:
    attempt = ranks.start(spec(train={"steps": 100_000, "global_batch": 12}))
    attempt.until(lambda: len(attempt.messages[1]) > 4)
    attempt.order(1, checkpoint=True, stop=True)
    attempt.succeeded()
    (first,), (second,) = (attempt.of_kind(rank, RankFinished) for rank in (0, 1))
    assert first == second
    assert first.drained
    assert {attempt.of_kind(rank, RankVote)[-1].step for rank in (0, 1)} == {first.step}
    assert max(attempt.losses(0)) == max(attempt.losses(1)) == first.step


def test_a_stop_without_a_checkpoint_writes_none(ranks: Ranks, spec: Spec) -> None:
    attempt = ranks.start(
        spec(train={"steps": 100_000, "global_batch": 12}, checkpoint={"every_steps": 0})
    )
    attempt.until(lambda: bool(attempt.of_kind(0, RankReady)))
    attempt.order(0, stop=True)
    attempt.succeeded()
    assert attempt.of_kind(0, RankFinished)[0].drained
    assert attempt.of_kind(0, RankVote) == []


def test_an_ordered_checkpoint_is_taken_on_the_way(ranks: Ranks, spec: Spec) -> None:
    attempt = ranks.start(
        spec(train={"steps": 100_000, "global_batch": 12}, checkpoint={"every_steps": 0})
    )
    attempt.order(1, checkpoint=True)
    attempt.until(lambda: all(attempt.of_kind(rank, RankVote) for rank in (0, 1)))
    attempt.order(0, stop=True)
    attempt.succeeded()
    (vote,), (other,) = (attempt.of_kind(rank, RankVote) for rank in (0, 1))
    assert vote.step == other.step < attempt.of_kind(0, RankFinished)[0].step


def test_an_exception_in_the_users_model_is_told_with_its_traceback(
    ranks: Ranks, spec: Spec
) -> None:
    attempt = ranks.start(spec(model={"factory": f"{USER}:FailsOnOneRank", "args": {}}), units=())
    assert attempt.ended() == [1, 1]
    (failure,) = attempt.of_kind(1, RankFailed)
    assert failure.error == "ZeroDivisionError: the user's third pass"
    assert "in forward" in failure.traceback
    assert failure.step == 2
    assert attempt.of_kind(0, RankFailed)[0].step == 2


def test_a_loss_that_is_no_number_ends_the_run_at_its_step(ranks: Ranks, spec: Spec) -> None:
    attempt = ranks.start(spec(model={"factory": f"{USER}:Explodes", "args": {}}), units=())
    assert attempt.ended() == [1, 1]
    for rank in (0, 1):
        (failure,) = attempt.of_kind(rank, RankFailed)
        assert failure.error == (
            "NonFiniteLossError: the loss of step 1 is nan; of this rank's share it is nan"
        )


def test_a_model_may_compute_its_own_loss(ranks: Ranks, spec: Spec) -> None:
    model = {"factory": f"{USER}:OwnLoss", "args": {}}
    attempt = ranks.start(spec(model=model), units=()).succeeded()
    assert attempt.losses()[6] < attempt.losses()[1]


def test_data_may_be_the_users_and_without_validation(ranks: Ranks, spec: Spec) -> None:
    data = {"factory": "tests.rank.user_data:Counting", "args": {}}
    attempt = ranks.start(spec(data=data)).succeeded()
    assert attempt.losses()[6] < attempt.losses()[1]
    assert attempt.of_kind(0, RankEvaluated) == []
    assert attempt.of_kind(0, RankReady)[0].data_digest == "counting 0"


def test_ranks_that_see_different_data_do_not_begin(ranks: Ranks, spec: Spec) -> None:
    data = {"factory": "tests.rank.user_data:Counting", "args": {"differs": True}}
    attempt = ranks.start(spec(data=data))
    assert attempt.ended() == [1, 1]
    for rank in (0, 1):
        assert "DataMismatchError" in attempt.of_kind(rank, RankFailed)[0].error


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": {"factory": "decodr"}}, "model.factory: there is no built-in 'decodr'"),
        ({"data": {"factory": "no.such:thing"}}, "data.factory: no.such:thing: No module named"),
        (
            {"model": {"factory": f"{USER}:BreaksItsPromise", "args": {}}},
            "module 'root' .* has no reset_parameters",
        ),
    ],
)
def test_a_spec_that_cannot_be_built_is_refused_by_name(
    ranks: Ranks, spec: Spec, parts: dict[str, dict[str, str]], message: str
) -> None:
    attempt = ranks.start(spec(**parts), 1, units=())
    assert attempt.ended() == [1]
    (failure,) = attempt.of_kind(0, RankFailed)
    assert re.search(message, failure.error)


def test_a_plan_that_names_no_module_is_refused(ranks: Ranks, spec: Spec) -> None:
    attempt = ranks.start(spec(), 1, units=(UnitPlan(("layers.*",)),))
    assert attempt.ended() == [1]
    assert "layers.*" in attempt.of_kind(0, RankFailed)[0].error


def test_a_batch_that_the_ranks_cannot_share_is_refused(ranks: Ranks, spec: Spec) -> None:
    attempt = ranks.start(spec(train={"global_batch": 5}))
    assert attempt.ended() == [1, 1]
    assert (
        "5 does not divide by the 2 data-parallel ranks" in attempt.of_kind(0, RankFailed)[0].error
    )


def test_half_precision_trains_with_whole_precision_sums(trained: Trained, spec: Spec) -> None:
    whole = trained.of(spec()).losses()
    half = trained.of(spec(), param_dtype="bf16").losses()
    assert half != whole
    assert half == pytest.approx(whole, abs=0.05)
