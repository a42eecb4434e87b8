"""What the board costs a training step: the same training with it and without, by turns.

``python -m benchmarks.telemetry`` trains the built-in decoder on two ranks. Every block of steps
with the board (phases, units, collectives, arrivals, figures of the step, pulse, and a reader that
looks at both boards ten times a second, as the agent does) is followed by one without, in the same
processes, so that whatever else the machine does meets both alike. It prints the ratio of each
pair's step times: the median, its 90 % interval (by resampling) and the quartiles of the pairs.

Wall times are noisy on a machine that has other things to do. So the same is told of the processor
time that the ranks use, and the events of a step are counted and a store is timed alone: their
product is what the training thread spends.
"""

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from fsdp_core import TrainingState, fully_shard, observe
from services.contract.messages.board import BoardReader, BoardStep, BoardWriter
from services.worker.rank.gang.control import CONTROL_GROUP, ControlChannel
from services.worker.rank.loop.board_watch import BoardWatch
from services.worker.rank.models.decoder import Decoder

WORLD = 2
GROUPS = ("dp_shard", CONTROL_GROUP)
PULSE_S = 0.25
LOOK_S = 0.1
STORES = 20_000


class Nobody:
    """An observer that keeps nothing, and counts."""

    events = 0

    def on_state(self, *_: object) -> None:
        """A unit changed its state."""
        self.events += 1

    def on_issue(self, *_: object) -> None:
        """A collective was started."""
        self.events += 1

    def on_complete(self, *_: object) -> None:
        """A collective was waited for."""
        self.events += 1


class Deaf(Nobody):
    """An observer that does nothing at all: what every training pays."""

    def on_state(self, *_: object) -> None:
        """A unit changed its state."""

    def on_issue(self, *_: object) -> None:
        """A collective was started."""

    def on_complete(self, *_: object) -> None:
        """A collective was waited for."""


@dataclass(frozen=True)
class Course:
    """What is trained, and for how long."""

    pairs: int
    steps: int
    dim: int
    layers: int
    length: int
    batch: int


class Training:
    """One rank's training."""

    def __init__(self, rank: int, course: Course, folder: Path, watched: Any) -> None:  # noqa: ANN401 a flag of multiprocessing has no public type
        self._course = course
        self._watched = watched
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp_shard",))
        torch.manual_seed(7)
        self._model = Decoder(dim=course.dim, layers=course.layers, heads=4)
        for block in self._model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._tokens = torch.randint(0, 256, (course.batch, course.length + 1))
        self._board = BoardWriter.create(folder / f"{rank}", fence=1)
        self._watch = BoardWatch(self._board, GROUPS, torch.device("cpu"))
        self._group = dist.new_group(backend="gloo")
        threading.Thread(target=self._beat, daemon=True).start()

    def block(self, *, on: bool) -> tuple[float, float]:
        """Seconds of a step on average over a block: on the clock, and of the processor."""
        listener = self._watch if on else Deaf()
        observe(self._model, listener)
        control = ControlChannel(self._group, listener)
        dist.barrier()
        self._watched.value = on
        self._step(control, 0, on=on)
        began, worked = time.perf_counter(), time.process_time()
        for number in range(1, self._course.steps + 1):
            self._step(control, number, on=on)
        steps = self._course.steps
        return (time.perf_counter() - began) / steps, (time.process_time() - worked) / steps

    def events_of_a_step(self) -> int:
        """How often the engine and the control channel tell in a step."""
        counter = Nobody()
        observe(self._model, counter)
        self._step(ControlChannel(self._group, counter), 0, on=False)
        return counter.events

    def _step(self, control: ControlChannel, number: int, *, on: bool) -> None:
        agreement = control.all_reduce(torch.zeros(2))
        logits = self._model(self._tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # PyTorch's
        mean = control.all_reduce(loss.detach().double())
        self._optimizer.step()
        self._optimizer.zero_grad()
        figure = float(mean.wait())
        agreement.wait()
        if on:
            self._watch.finish_step(BoardStep(number, figure, 0.0, 1e-3, 1.0, 1.0))

    def _beat(self) -> None:
        never = threading.Event()
        while True:
            if self._watched.value:
                self._board.beat(time.monotonic_ns())
            never.wait(PULSE_S)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.telemetry")
    for name, value in {
        "pairs": 80, "steps": 4, "dim": 128, "layers": 6, "length": 64, "batch": 4,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    course = Course(**vars(parser.parse_args(arguments)))
    context = mp.get_context("spawn")
    watched, answers = context.Value("b", 0), context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, course, folder, watched, answers))
            for rank in range(WORLD)
        ]
        for process in ranks:
            process.start()
        _look(Path(folder), ranks, watched)
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit("a rank failed")
        on, off, events = answers.get()
    _report(on, off, events)


def _rank(rank: int, course: Course, folder: str, watched: Any, answers: Any) -> None:  # noqa: ANN401 as above
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)  # type: ignore[attr-defined]  # PyTorch exports it implicitly
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    training = Training(rank, course, Path(folder), watched)
    training.block(on=True)
    training.block(on=False)
    on: list[tuple[float, float]] = []
    off: list[tuple[float, float]] = []
    for pair in range(course.pairs):
        # Whichever comes first may gain or lose by it.
        for turn in (pair % 2 == 0, pair % 2 == 1):
            (on if turn else off).append(training.block(on=turn))
    events = training.events_of_a_step()
    dist.barrier()
    if rank == 0:
        answers.put((on, off, events))
    dist.destroy_process_group()


def _look(folder: Path, ranks: Sequence[Any], watched: Any) -> None:  # noqa: ANN401 as above
    """Read the boards as the agent does, until the ranks have ended."""
    readers: dict[int, BoardReader] = {}
    while any(process.is_alive() for process in ranks):
        ranks[0].join(LOOK_S)
        for rank in range(WORLD):
            if rank not in readers and (folder / f"{rank}").exists():
                readers[rank] = BoardReader.open(folder / f"{rank}")
            if rank in readers and watched.value:
                readers[rank].read()
                readers[rank].steps_after(0)
                for place in range(len(GROUPS)):
                    readers[rank].arrivals(place)


def _report(
    on: Sequence[tuple[float, float]], off: Sequence[tuple[float, float]], events: int
) -> None:
    step_s = statistics.median(wall for wall, _ in off)
    store_s = _seconds_a_store()
    lines = (
        f"step without the board    {1e3 * step_s:.2f} ms (median of {len(off)} blocks)",
        f"added on the clock        {_added([a / b for (a, _), (b, _) in zip(on, off, strict=True)])}",
        f"added to processor time   {_added([a / b for (_, a), (_, b) in zip(on, off, strict=True)])}",
        f"events of a step          {events}, a store takes {1e6 * store_s:.1f} µs",
        f"added to the thread       {100 * events * store_s / step_s:+.2f} %",
    )
    sys.stdout.write("\n".join(lines) + "\n")


def _added(ratios: Sequence[float]) -> str:
    added = [100 * (ratio - 1) for ratio in ratios]
    first, middle, third = statistics.quantiles(added, n=4)
    chance = random.Random(7)  # noqa: S311 no secret
    medians = [statistics.median(chance.choices(added, k=len(added))) for _ in range(2_000)]
    low, *_, high = statistics.quantiles(medians, n=20)
    return (
        f"{middle:+.2f} % (90 % interval {low:+.2f} … {high:+.2f}, "
        f"quartiles {first:+.2f} … {third:+.2f})"
    )


def _seconds_a_store() -> float:
    """Of the three kinds in equal parts; the best of several tries, as nothing else runs then."""
    with tempfile.TemporaryDirectory() as folder:
        watch = BoardWatch(
            BoardWriter.create(Path(folder) / "board", 1), GROUPS, torch.device("cpu")
        )
        best = float("inf")
        for _ in range(5):
            began = time.perf_counter()
            for number in range(1, STORES // 3 + 1):
                watch.on_state(TrainingState.FORWARD, 1, "block")
                watch.on_issue("dp_shard", number)
                watch.on_complete("dp_shard", number)
            best = min(best, (time.perf_counter() - began) / STORES)
        return best


if __name__ == "__main__":
    main()
