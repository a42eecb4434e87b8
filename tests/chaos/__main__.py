"""``python -m tests.chaos --seed 7 --minutes 20 --kill-every 60``: exit code 1 on any violation."""

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from tests.chaos.program import Options, torment


def main() -> None:
    """Run it, print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=7, help="of the faults and their order")
    parser.add_argument("--minutes", type=float, default=20, help="how long faults are injected")
    parser.add_argument("--kill-every", type=float, default=60, help="seconds between faults")
    parser.add_argument("--faults", type=int, help="stop after so many")
    parser.add_argument("--report", type=Path, help="write all figures there, as JSON")
    parser.add_argument("--folder", type=Path, help="keep logs and checkpoints there")
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="meshloom-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    console.print(f"logs, homes and checkpoints are in {folder}")
    command = " ".join(["python -m tests.chaos", *sys.argv[1:]])
    options = Options(asked.seed, asked.minutes, asked.kill_every, asked.faults, command=command)
    figures = torment(options, folder, console)
    console.print(figures.table())
    console.print(
        f"goodput {figures.goodput:.1%}: {figures.useful_steps} useful steps of "
        f"{figures.step_time_s * 1000:.0f} ms (median) in {figures.wall_s:.0f} s, "
        f"{figures.jobs} jobs; {figures.useful_part:.1%} of the time was spent in useful steps"
    )
    if asked.report:
        figures.write(asked.report)
    if figures.violation is not None:
        console.print(f"[bold red]violation:[/] {figures.violation} (seed {figures.seed})")
        sys.exit(1)


if __name__ == "__main__":
    main()
