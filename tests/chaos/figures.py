"""What a chaos run measured, and the table that it ends with."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.table import Table


@dataclass
class Injected:
    """A fault that was injected. Times in seconds from its injection, or from its end.

    Attributes:
        name: Of the fault.
        at_s: When, from the beginning of the run.
        away_s: How long it lasted.
        detect_s: Until the controller had concluded that the attempt was over.
        first_step_s: Until the first step of the next attempt.
        truthful_s: From the end of the fault until the status was right again, where it costs no
            attempt.
        gone_s: From the end of the fault until no rank of the ended attempt lived on the node
            that woke or was reached again.
        lost_steps: Steps that had to be made again.
    """

    name: str
    at_s: float
    away_s: float
    detect_s: float | None = None
    first_step_s: float | None = None
    truthful_s: float | None = None
    gone_s: float | None = None
    lost_steps: int = 0


@dataclass
class Figures:
    """A run.

    ``useful_s`` is what the useful steps took, each its own time: on a machine whose speed changes
    the median step says little.
    """

    seed: int
    command: str
    wall_s: float = 0.0
    useful_steps: int = 0
    useful_s: float = 0.0
    step_time_s: float = 0.0
    jobs: int = 0
    faults: list[Injected] = field(default_factory=list)
    violation: str | None = None

    @property
    def goodput(self) -> float:
        """Useful steps x median step time / wall time."""
        return self.useful_steps * self.step_time_s / self.wall_s if self.wall_s else 0.0

    @property
    def useful_part(self) -> float:
        """The part of the wall time that was spent in useful steps."""
        return self.useful_s / self.wall_s if self.wall_s else 0.0

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(
            json.dumps(
                {**asdict(self), "goodput": self.goodput, "useful_part": self.useful_part}, indent=1
            )
        )

    def table(self) -> Table:
        """One line a kind of fault: median, 95th percentile and maximum of each time."""
        table = Table(title=f"seed {self.seed}: {len(self.faults)} faults in {self.wall_s:.0f} s")
        table.add_column("fault")
        for name in (
            "number",
            "noticed s",
            "next first step s",
            "truthful s",
            "zombies gone s",
            "steps again",
        ):
            table.add_column(name, justify="right")
        for name in dict.fromkeys(injected.name for injected in self.faults):
            kind = [injected for injected in self.faults if injected.name == name]
            table.add_row(
                name,
                str(len(kind)),
                spread([i.detect_s for i in kind]),
                spread([i.first_step_s for i in kind]),
                spread([i.truthful_s for i in kind]),
                spread([i.gone_s for i in kind]),
                spread([float(i.lost_steps) for i in kind], digits=0),
            )
        return table


def spread(values: Sequence[float | None], digits: int = 1) -> str:
    """``median / 95th percentile / maximum`` of what is known."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return "-"
    p95 = known[min(len(known) - 1, round(0.95 * (len(known) - 1)))]
    return " / ".join(f"{v:.{digits}f}" for v in (statistics.median(known), p95, known[-1]))
