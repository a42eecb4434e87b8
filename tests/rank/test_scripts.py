"""Scripts in real ranks: as under torchrun, and with the lines of ``meshloom.session``."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.contract.jobs.specs import JobSpec
from services.contract.messages.rank_pipe import (
    RankFailed,
    RankFinished,
    RankReady,
    RankVote,
)
from services.contract.words.states import RankPhase
from services.local.settings import child_environment
from tests.rank.gang import Attempt, Ranks, ranks_below

pytestmark = [pytest.mark.ranks, pytest.mark.system]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PLAIN = "script/train.py"
WITH_SESSION = "script/train_with_session.py"
STEPS = 8
SAVED = 4
ARGS = ("--steps", str(STEPS), "--every", str(SAVED), "--dim", "16")
GLOO_ABORTED = "terminate called without an active exception"


def job(script: str = WITH_SESSION, *args: str) -> JobSpec:
    return JobSpec.model_validate(
        {
            "entrypoint": {"script": script, "args": args or ARGS},
            "resources": {"ranks": 2, "device": "cpu"},
        }
    )


def printed(output: str) -> dict[int, float]:
    """The losses that a script prints, by step."""
    return {int(s): float(loss) for s, loss in re.findall(r"step (\d+) loss (\S+)", output)}


def under_torchrun(script: str, *args: str) -> dict[int, float]:
    """What a script prints that torchrun runs on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(EXAMPLES / script), *args],
        env=child_environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    # Where PyTorch takes gloo's threads down at the end, a process aborts now and then; so does one that
    # never heard of us. All that it had to print is there by then.
    assert done.returncode == 0 or GLOO_ABORTED in done.stderr, done.stderr
    return printed(done.stdout)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attempt]:
    """The script with the session's lines, from its first step to its last."""
    with ranks_below(tmp_path_factory.mktemp("undisturbed")) as ranks:
        yield ranks.start(job(), code=EXAMPLES).succeeded()


def test_an_unchanged_script_has_the_losses_that_it_has_under_torchrun(ranks: Ranks) -> None:
    args = ("--steps", "3", "--dim", "16")
    attempt = ranks.start(job(PLAIN, *args), code=EXAMPLES).succeeded()
    losses = printed((ranks.root / "rank-0.log").read_text())
    assert losses == under_torchrun(PLAIN, *args)
    assert len(losses) == 3
    assert [attempt.of_kind(rank, RankFinished)[0].step for rank in (0, 1)] == [0, 0]
    assert attempt.losses() == {}


def test_what_a_script_reports_is_on_the_board_and_its_lines_do_nothing_under_torchrun(
    undisturbed: Attempt,
) -> None:
    steps = undisturbed.steps()
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    assert {step.of for step in steps} == {STEPS}
    assert all(step.tokens_per_s == pytest.approx(8 / step.step_time_s) for step in steps)
    shown = undisturbed.board(1).read()
    assert shown is not None
    assert (shown.phase, shown.step) == (RankPhase.FINISHED, STEPS)
    losses = under_torchrun(WITH_SESSION, *ARGS)
    assert undisturbed.losses() == pytest.approx(losses, rel=1e-15)
    finished = undisturbed.of_kind(0, RankFinished)[0]
    assert (finished.step, finished.drained) == (STEPS, False)


def test_a_script_whose_rank_is_killed_goes_on_from_its_checkpoint_with_the_same_bits(
    ranks: Ranks, undisturbed: Attempt
) -> None:
    first = ranks.start(job(WITH_SESSION, "--steps", "100000", *ARGS[2:]), code=EXAMPLES)
    first.until(lambda: all(first.of_kind(rank, RankVote) for rank in (0, 1)))
    first.processes[1].kill()
    assert first.ended()[1] == -9
    source = first.committed(SAVED)
    again = ranks.start(job(), fence=2, resume_from=source.checkpoint_id, code=EXAMPLES)
    again.succeeded()
    assert again.losses_after(0) == undisturbed.losses_after(SAVED)


def test_a_script_that_is_asked_to_stop_saves_its_state_and_ends_as_drained(ranks: Ranks) -> None:
    forever = job(WITH_SESSION, "--steps", "100000", "--every", "3", "--dim", "16")
    first = ranks.start(forever, code=EXAMPLES)
    first.until(lambda: bool(first.of_kind(0, RankVote)))
    first.order(1, checkpoint=True, stop=True)
    first.succeeded()
    votes = [[vote.step for vote in first.of_kind(rank, RankVote)] for rank in (0, 1)]
    assert votes[0] == votes[1]
    finished = [first.of_kind(rank, RankFinished)[0] for rank in (0, 1)]
    assert [(end.step, end.drained) for end in finished] == [(votes[0][-1], True)] * 2


def test_a_checkpoint_that_is_asked_for_is_taken_where_none_was_due(ranks: Ranks) -> None:
    forever = job(WITH_SESSION, "--steps", "100000", "--every", "0", "--dim", "16")
    first = ranks.start(forever, code=EXAMPLES)
    for taken in (1, 2):
        first.order(taken - 1, checkpoint=True)
        first.until(lambda: all(len(first.of_kind(r, RankVote)) == taken for r in (0, 1)))  # noqa: B023 at once
    first.order(0, stop=True)
    first.succeeded()
    steps = [[vote.step for vote in first.of_kind(rank, RankVote)] for rank in (0, 1)]
    assert steps[0] == steps[1]
    assert len(set(steps[0])) == 2
    assert first.of_kind(0, RankFinished)[0].drained


@pytest.mark.parametrize("world", [1, 4])
def test_a_script_goes_on_at_another_number_of_ranks(ranks: Ranks, world: int) -> None:
    even = (*ARGS, "--dropout", "0")
    first = ranks.start(job(WITH_SESSION, *even), code=EXAMPLES).succeeded()
    source = first.committed(SAVED)
    again = ranks.start(
        job(WITH_SESSION, *even), world, fence=2, resume_from=source.checkpoint_id, code=EXAMPLES
    )
    again.succeeded()
    assert again.losses() == pytest.approx(first.losses_after(SAVED), abs=1e-5)


def test_a_script_on_our_engine_goes_on_with_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    text = (EXAMPLES / WITH_SESSION).read_text()
    ours = text.replace("from torch.distributed.fsdp import", "from fsdp_core import")
    assert ours != text
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(ours)
    first = ranks.start(job("train.py"), code=tmp_path / "code").succeeded()
    source = first.committed(SAVED)
    again = ranks.start(
        job("train.py"), fence=2, resume_from=source.checkpoint_id, code=tmp_path / "code"
    )
    again.succeeded()
    assert again.losses() == first.losses_after(SAVED)


def test_what_cannot_be_saved_is_named_by_its_place(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from meshloom import session\n"
        "session.report(1, loss=1.0)\n"
        "session.checkpoint({'step': 1, 'data': {'queue': [1, object()]}})\n"
    )
    attempt = ranks.start(job("train.py"), world=1, code=tmp_path)
    assert attempt.ended() == [1]
    (failed,) = attempt.of_kind(0, RankFailed)
    assert "state['data']['queue'][1]: a object cannot be saved" in failed.error
    assert failed.traceback.splitlines()[1].endswith(
        f'"{tmp_path / "train.py"}", line 3, in <module>'
    )


FORGETS = """
import torch
from meshloom import session
for step in (1, 2, 3):
    session.report(step, loss=1.0, tokens=4)
    state = {"step": step, "kept": torch.ones(1), "other": torch.ones(1)}
    session.checkpoint(state, every=1)
"""


def test_a_resumed_script_that_restores_nothing_is_told_so_once(
    ranks: Ranks, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(FORGETS)
    first = ranks.start(job("train.py"), code=tmp_path).succeeded()
    assert [ready.notices for ready in first.of_kind(0, RankReady)] == [(), ()]
    source = first.committed(2).checkpoint_id
    again = ranks.start(job("train.py"), fence=2, resume_from=source, code=tmp_path).succeeded()
    told = [again.of_kind(rank, RankReady) for rank in (0, 1)]
    (notice,) = told[0][-1].notices
    assert notice.startswith(f"the attempt resumes from checkpoint {source}, but the script has")
    assert [{ready.notices for ready in each} for each in told] == [{(), (notice,)}] * 2
    assert (ranks.root / "rank-0.log").read_text().count(notice) == 1
    parts = "session.restore({'step': 0})\nsession.restore({'other': torch.zeros(1)})\nfor"
    restores = FORGETS.replace("for", parts).replace("(1, 2, 3)", "(3,)")
    (tmp_path / "train.py").write_text(restores)
    well = ranks.start(job("train.py"), fence=3, resume_from=source, code=tmp_path).succeeded()
    assert {ready.notices for ready in well.of_kind(0, RankReady)} == {()}
    left_out = "not restored, since the given state lacks it: state['kept']\n"
    log = (ranks.root / "rank-0.log").read_text()
    assert (left_out in log, log.count("not restored")) == (True, 1)


@pytest.mark.parametrize(
    ("package", "said"),
    [
        ("services", "{folder}/services is hidden by Meshloom's own package services; rename it"),
        (None, "services, fsdp_core, meshloom are Meshloom's own packages, so yours"),
    ],
)
def test_a_script_that_imports_from_a_package_with_our_name_hears_that_it_is_reserved(
    ranks: Ranks, tmp_path: Path, package: str | None, said: str
) -> None:
    folder = tmp_path / "deeper"
    folder.mkdir()
    (folder / "train.py").write_text("from services.mine import Model")
    if package is not None:
        (folder / package).mkdir()
        (folder / package / "mine.py").write_text("class Model: ...")
    attempt = ranks.start(job("deeper/train.py"), world=1, code=tmp_path)
    assert attempt.ended() == [1]
    (failed,) = attempt.of_kind(0, RankFailed)
    assert failed.error.startswith("ModuleNotFoundError: No module named 'services.mine': ")
    assert said.format(folder=folder) in failed.error


@pytest.mark.parametrize("by", ["torch", "ours", "ddp"])
def test_the_model_of_a_script_is_told_that_it_was_loaded(ranks: Ranks, by: str) -> None:
    programs = Path(__file__).parent / "programs"
    whole = ranks.start(job("told_loop.py", by), code=programs).succeeded()
    source = whole.committed(2).checkpoint_id
    again = ranks.start(job("told_loop.py", by), fence=2, resume_from=source, code=programs)
    again.succeeded()
    assert again.losses() == whole.losses_after(2)


READS = """
import contextlib
import warnings
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from meshloom import session
warnings.filterwarnings("ignore", "'set_vital' is deprecated")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = StatefulDataLoader(torch.randn(10, 4), batch_size=2, shuffle=True)
state = {"model": model, "optimizer": optimizer, "loader": loader, "step": 0}
state = session.restore(state) or state
with torch.random.fork_rng() if state["step"] else contextlib.nullcontext():
    batches = iter(loader)
for step in range(state["step"] + 1, 9):
    try:
        batch = next(batches)
    except StopIteration:
        batches = iter(loader)
        batch = next(batches)
    optimizer.zero_grad()
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    state["step"] = step
    session.report(step, loss=loss)
    session.checkpoint(state, every=3)
"""


def test_a_script_goes_on_in_the_midst_of_an_epoch_with_the_same_bits(
    ranks: Ranks, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(READS)
    whole = ranks.start(job("train.py"), world=1, code=tmp_path).succeeded()
    source = whole.committed(3).checkpoint_id
    again = ranks.start(job("train.py"), 1, fence=2, resume_from=source, code=tmp_path)
    assert again.succeeded().losses() == whole.losses_after(3)


def test_a_script_with_fsdp1_goes_on_and_may_not_save_the_slices_of_an_optimizer(
    ranks: Ranks,
) -> None:
    programs = Path(__file__).parent / "programs"
    whole = ranks.start(job("fsdp1_loop.py", ""), code=programs).succeeded()
    source = whole.committed(2).checkpoint_id
    again = ranks.start(
        job("fsdp1_loop.py", ""), fence=2, resume_from=source, code=programs
    ).succeeded()
    assert again.losses() == {step: loss for step, loss in whole.losses().items() if step > 2}
    for fence, args in ((3, ["--optimizer"]), (4, ["--optimizer", "--original"])):
        refused = ranks.start(job("fsdp1_loop.py", *args), fence=fence, code=programs)
        assert refused.ended() == [1, 1]
        (failure,) = refused.of_kind(0, RankFailed)
        assert "state['optimizer']: an optimizer of PyTorch's FSDP1" in failure.error
