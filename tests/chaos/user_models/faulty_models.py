"""A decoder of which one rank fails as it is told to, once, whatever attempt it is in.

An order is a file ``rank-<r>`` in the folder that the spec names, and its text is the fault. It is
removed when it is read, so that the next attempt goes on.
"""

import contextlib
import ctypes
import os
import resource
import threading
from pathlib import Path

import torch
from torch.profiler import profile

from services.worker.rank.models.decoder import Decoder

_FOREVER_S = 1 << 30
_LONGER_THAN_A_HANG_S = 9.0
_LOOKS_EVERY_S = 0.05
_ROOM_BYTES = 64 << 20


class FaultyDecoder(Decoder):
    """The built-in decoder, bit for bit, until an order is given.

    Args:
        orders: The folder of the orders.
        pace_s: A rest before each pass, for a job that takes its time and no processor; a file
            ``pace`` in the folder of the orders, with a number in it, comes before it. A file ``hold``
            there lets only so many passes of an attempt begin, as long as it is there.
        sizes: Of the decoder.
    """

    def __init__(self, orders: str, pace_s: float = 0.0, **sizes: int) -> None:
        super().__init__(**sizes)
        self._orders = Path(orders)
        self._pace_s = pace_s
        self._passes = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        order = self._orders / f"rank-{torch.distributed.get_rank()}"
        if order.exists():
            word = order.read_text()
            order.unlink()
            FAULTS[word]()
        self._passes += 1
        while self._is_held():
            threading.Event().wait(_LOOKS_EVERY_S)
        threading.Event().wait(self._rest_s())
        return super().forward(tokens)

    def _is_held(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return self._passes > int((self._orders / "hold").read_text())
        return False

    def _rest_s(self) -> float:
        with contextlib.suppress(FileNotFoundError):
            return float((self._orders / "pace").read_text())
        return self._pace_s


def _raise() -> None:
    raise ArithmeticError("this rank fails as it was told to")


def _exit() -> None:
    os._exit(7)


def _run_out_of_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM_BYTES, used + _ROOM_BYTES))
    torch.empty(1 << 30, dtype=torch.float64)


def _hold_the_gil() -> None:
    ctypes.PyDLL(None).sleep(_FOREVER_S)  # unlike CDLL, it keeps the lock while C runs


def _take_long_over_traces() -> None:
    export = profile.export_chrome_trace

    def slow(self: profile, path: str, use_python_export: bool = False) -> None:  # noqa: FBT001, FBT002 as PyTorch's
        threading.Event().wait(_LONGER_THAN_A_HANG_S)
        export(self, path, use_python_export)

    profile.export_chrome_trace = slow  # type: ignore[method-assign,assignment]  # in this process


FAULTS = {
    "raise": _raise,
    "exit": _exit,
    "run out of memory": _run_out_of_memory,
    "hold the GIL": _hold_the_gil,
    "take long over traces": _take_long_over_traces,
}
