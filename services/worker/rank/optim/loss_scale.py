"""The factor by which losses are multiplied, so that gradients in fp16 neither vanish nor overflow."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final

_GROWS_AFTER: Final = 2000
_FACTOR: Final = 2.0
_LARGEST: Final = 2.0**24
MOST_IN_A_ROW: Final = 25
"""Of skipped steps: from the first factor on, the last of them had one below a thousandth."""


@dataclass(frozen=True)
class LossScale:
    """A power of two that is halved when gradients overflow, and doubled after 2000 steps without.

    Source: Micikevicius et al. 2017 (arXiv:1710.03740), with the constants of ``torch.amp.GradScaler``.
    What overflowed is agreed on by all ranks before: they see one norm.

    Attributes:
        scale: The factor.
        clean: Steps since the last change.
        in_a_row: Steps that were skipped just before.
        skipped: Of all steps.
    """

    scale: float = 65_536.0
    clean: int = 0
    in_a_row: int = 0
    skipped: int = 0

    def after(self, *, overflowed: bool) -> "LossScale":
        """The state after a step, which was skipped if its gradients overflowed."""
        if overflowed:
            return LossScale(self.scale / _FACTOR, 0, self.in_a_row + 1, self.skipped + 1)
        if self.clean + 1 < _GROWS_AFTER:
            return replace(self, clean=self.clean + 1, in_a_row=0)
        grown = min(self.scale * _FACTOR, _LARGEST)
        return replace(self, scale=grown, clean=0, in_a_row=0)


class LossScaler:
    """Holds the scale of a run."""

    def __init__(self) -> None:
        self.now = LossScale()

    def state(self) -> Mapping[str, float]:
        """For JSON."""
        return asdict(self.now)

    def restore(self, state: Mapping[str, float]) -> None:
        """Takes back what ``state`` gave."""
        self.now = LossScale(
            float(state["scale"]),
            int(state["clean"]),
            int(state["in_a_row"]),
            int(state["skipped"]),
        )
