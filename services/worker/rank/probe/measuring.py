"""Measures computation, memory and exchange, in several processes at once.

All of them call the same functions in the same order, and each finds the same: the figure of the
slowest, for which the others wait in every step.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
import torch.distributed as dist

from fsdp_core.comm.collectives import GroupCollectives
from fsdp_core.plan.model import NodeFacts
from services.worker.rank.probe.engine_costs import engine_costs

# A job may wait for its plan, and the plan for these figures.
_FIGURE_S: Final = 0.1
_TRIALS: Final = 5
_TURN_S: Final = 0.004
_TURNS_S: Final = 0.4
_TURNS: Final = 3
_MOST_ROUNDS: Final = 100
_DTYPES: Final[Mapping[str, Mapping[str, torch.dtype]]] = {
    "cpu": {"fp32": torch.float32, "bf16": torch.bfloat16},
    "cuda": {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16},
}
# So large that neither launches nor caches are what is measured, and small enough for the time.
MATRIX_WIDTH: Final = {"cpu": 768, "cuda": 8192}
_COPIED_BYTES: Final = {"cpu": 64 << 20, "cuda": 512 << 20}
_GATHERED_BYTES: Final = {"cpu": 8 << 20, "cuda": 128 << 20}
_ITEM_BYTES: Final = 4
_HOST: Final = torch.device("cpu")


@dataclass(frozen=True)
class MeasuringRank:
    """One of the processes.

    Attributes:
        rank: Its number.
        device_type: Of the devices that are measured.
        device: Where it computes; None: it is only there to be sent to.
        host: All processes, for what lies in the host's memory.
        data: Through which ranks exchange their data; None: there is but one.
    """

    rank: int
    device_type: str
    device: torch.device | None
    host: GroupCollectives
    data: GroupCollectives | None


def node_facts(this: MeasuringRank, seats: int, processes: int) -> NodeFacts:
    """Measures, together with all other processes.

    Args:
        this: This process.
        seats: Ranks that the node takes.
        processes: How many compute now. Where these are fewer, each rank gets as much less.
    """
    share = min(1.0, processes / seats)
    operations = 2 * MATRIX_WIDTH[this.device_type] ** 3
    seconds = {word: _round_s(this, _product(this, word)) for word in _DTYPES[this.device_type]}
    memory = _copied_a_second(this)
    exchange = _Exchange(this.host, _HOST)
    exchange_s = _round_s(this, exchange.once)
    network = link = exchange.sent / exchange_s
    overlap = 0.0
    if this.data is not None and this.device is not None:
        if this.data is not this.host:
            exchange = _Exchange(this.data, this.device)
            exchange_s = _round_s(this, exchange.once)
            link = exchange.sent / exchange_s
        overlap = _overlap(this, exchange, exchange_s, seconds["fp32"])
    facts = NodeFacts(
        matmul_flops={word: share * operations / each for word, each in seconds.items()},
        memory_bandwidth=share * memory,
        link_bandwidth=link,
        network_bandwidth=network,
        collective_latency=_round_s(this, exchange.smallest().once) / exchange.collectives,
        ranks=seats,
        overlap=overlap,
    )
    return _with_engine(this, facts, share)


def _with_engine(this: MeasuringRank, facts: NodeFacts, share: float) -> NodeFacts:
    """What the engine and launching operators take, too."""
    group = None if this.data is None else this.data.group
    costs = engine_costs(this.device or _HOST, group, partial(_in_turns_s, this))
    return replace(
        facts,
        dispatch_s=costs.dispatch / share,
        unit_s=costs.unit / share,
        parameter_s=costs.parameter / share,
        sharded_parameter_s=costs.sharded_parameter / share,
        norm_s=costs.norm,
        update_s=costs.update / share,
        exchanges=costs.exchanges,
        shared_exchanges=costs.shared_exchanges,
    )


class _Exchange:
    """An all-gather and a reduce-scatter of as much, which a sharded step has of each unit.

    Args:
        group: Among whom.
        device: Of the tensors.
        nbytes: Of the whole.
    """

    collectives = 2

    def __init__(
        self, group: GroupCollectives, device: torch.device, nbytes: int | None = None
    ) -> None:
        row = (nbytes or _GATHERED_BYTES[device.type]) // _ITEM_BYTES // group.size
        self._group, self._device = group, device
        self._whole = group.gather_buffer(row * group.size, torch.float32, device).zero_()
        self._row = group.reduce_buffer(row, torch.float32, device)
        self.sent = self.collectives * (group.size - 1) * row * _ITEM_BYTES

    def smallest(self) -> "_Exchange":
        """The same of one element a rank."""
        return _Exchange(self._group, self._device, self._group.size * _ITEM_BYTES)

    def once(self) -> None:
        """One after the other."""
        self.beside(lambda: None)

    def beside(self, work: Callable[[], None]) -> None:
        """The same, with ``work`` done beside each of the two."""
        own = self._whole.view(self._group.size, -1)[self._group.rank]
        gathering = self._group.all_gather(self._whole, own, on_stream=False)
        work()
        _wait_for(gathering)
        reducing = self._group.reduce_scatter(
            self._row, self._whole, dist.ReduceOp.SUM, on_stream=False
        )
        work()
        _wait_for(reducing)


def _wait_for(pending: dist.Work | None) -> None:
    if pending is not None:
        pending.wait()


def _idle() -> None:
    """What a process does that is only there to be sent to."""


def _product(this: MeasuringRank, word: str) -> Callable[[], object]:
    device = this.device
    if device is None:
        return _idle
    width = MATRIX_WIDTH[this.device_type]
    left, right, product = (
        torch.randn(width, width, device=device).to(_DTYPES[this.device_type][word])
        for _ in range(3)
    )
    return lambda: torch.mm(left, right, out=product)


def _copied_a_second(this: MeasuringRank) -> float:
    """Bytes that are read or written."""
    nbytes = _COPIED_BYTES[this.device_type]
    copy: Callable[[], object] = _idle
    if this.device is not None:
        source = torch.zeros(nbytes, dtype=torch.uint8, device=this.device)
        copy = partial(torch.empty_like(source).copy_, source)
    return 2 * nbytes / _round_s(this, copy)


def _overlap(
    this: MeasuringRank, exchange: _Exchange, exchange_s: float, product_s: float
) -> float:
    """Which part of the shorter of exchange and computation the other one hides."""
    count = max(1, round(exchange_s / exchange.collectives / product_s))
    product = _product(this, "fp32")

    def work() -> None:
        for _ in range(count):
            product()

    compute_s = exchange.collectives * count * product_s
    both_s = _round_s(this, lambda: exchange.beside(work))
    hidden = (exchange_s + compute_s - both_s) / min(exchange_s, compute_s)
    return min(1.0, max(0.0, hidden))


def _round_s(this: MeasuringRank, once: Callable[[], object]) -> float:
    """Seconds that ``once`` takes when all do it at once, at the slowest."""
    once()
    guess = _timed(this, once, 1)
    rounds = min(_MOST_ROUNDS, max(1, int(_FIGURE_S / _TRIALS / guess)))
    # Whatever else the node does now makes it slower, never faster.
    return min(_timed(this, once, rounds) for _ in range(_TRIALS))


def _in_turns_s(this: MeasuringRank, calls: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds of each: the shortest of some rounds in which each has its turn.

    Differences of these count, and rounds are few: whatever else the node does lengthens one or the other.
    """
    if this.device is None:
        calls = [_idle] * len(calls)
    guesses = [(once(), _timed(this, once, 1))[1] for once in calls]
    repeats = [min(_MOST_ROUNDS, max(1, int(_TURN_S / guess))) for guess in guesses]
    found: list[list[float]] = [[] for _ in calls]
    began = time.perf_counter()
    while _slowest(this, time.perf_counter() - began) < _TURNS_S or len(found[0]) < _TURNS:
        for times, once, count in zip(found, calls, repeats, strict=True):
            times.append(_timed(this, once, count))
    return [min(times) for times in found]


def _timed(this: MeasuringRank, once: Callable[[], object], rounds: int) -> float:
    _slowest(this, 0.0)  # all begin together
    began = time.perf_counter()
    for _ in range(rounds):
        once()
    if this.device is not None and this.device.type == "cuda":
        torch.cuda.synchronize(this.device)
    return _slowest(this, time.perf_counter() - began) / rounds


def _slowest(this: MeasuringRank, seconds: float) -> float:
    of_all = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(of_all, op=dist.ReduceOp.MAX, group=this.host.group)
    return float(of_all)
