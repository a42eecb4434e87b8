"""What a rank writes to its log for people to read."""

from collections.abc import Mapping
from typing import Final

from services.contract.messages.board import BoardStep
from services.contract.system.own_process import say
from services.worker.rank.loop.run import Run

_STEP_LINES: Final = 50


def ready(run: Run, resumed: int) -> None:
    """The rank is about to make its first step."""
    parameters = sum(p.numel() for p in run.model.parameters())
    units = f"{len(run.units)} unit{'s' * (len(run.units) != 1)}"
    _say(
        f"rank {run.gang.rank} of {run.gang.world_size} on {run.gang.device}: "
        f"{parameters:,} parameters in {units}, micro batch {run.micro_batch}, "
        f"data sha256 {run.data.digest[:12]} ({run.data.description}); goes on from step {resumed}"
    )
    if run.spec.train.deterministic:
        _say(
            "deterministic: operators give the same bits each time, or raise; cuBLAS has a workspace of "
            "fixed size, and cuDNN does not look for the fastest algorithm"
        )
    if run.scaler is not None:
        _say(f"fp16: losses are scaled, by {run.scaler.now.scale:g} at first")
    if run.gang.rank == 0:
        for notice in run.data.notices:
            _say(f"notice: {notice}")


def skipped(run: Run, step: int) -> None:
    """Rank 0 tells that gradients overflowed, so nothing was updated."""
    if run.gang.rank == 0 and run.scaler is not None:
        now = run.scaler.now
        _say(
            f"step {step}: skipped, for gradients overflowed in fp16 ({now.skipped} so far); "
            f"the loss scale is now {now.scale:g}"
        )


def stepped(run: Run, step: BoardStep) -> None:
    """Rank 0 tells of the first step and of fifty more."""
    steps = run.spec.train.steps
    every = max(1, steps // _STEP_LINES)
    if run.gang.rank == 0 and (step.step == 1 or step.step % every == 0):
        _say(
            f"step {step.step}/{steps}: loss {step.loss:.4f}, gradient norm {step.grad_norm:.3f}, "
            f"rate {step.learning_rate:.2e}, {step.tokens_per_s:,.0f} {'tokens' if run.counts_tokens else 'samples'}/s"
        )


def evaluated(step: int, loss: float, baselines: Mapping[str, float]) -> None:
    """A validation pass is done."""
    beside = ", ".join(f"{name} table {value:.3f}" for name, value in baselines.items())
    _say(f"step {step}: validation loss {loss:.4f}" + (f" ({beside})" if beside else ""))


def ended_early(run: Run, step: int, reason: str) -> None:
    """Rank 0 tells that evaluations ended the run."""
    if run.gang.rank == 0:
        _say(f"step {step}: {reason}")


def _say(line: str) -> None:
    say(line + "\n", "stdout")
