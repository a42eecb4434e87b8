"""Times forward and backward of a small model on real tensors, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch import nn

from fsdp_core.plan import fakes
from fsdp_core.plan.apply import DTYPES
from fsdp_core.plan.model import Growth, PassTimes
from fsdp_core.runtime.tensor_tree import map_tensors

if TYPE_CHECKING:
    from fsdp_core.plan.model.sharding import Precision
    from fsdp_core.plan.study import ModelUnderStudy

REFERENCE_WIDTH = 768
"""Rows and columns of the matrices by whose product the processor's speed is measured, here and in a node's self-test."""

_BUDGET_S = 1.0
_GIVEN_UP_S = 10
_LONGEST_PASS_S = 0.4
_REPEATS = 5
_FACTOR = 2
_GRADS_TOO = 2
_MOST_SIZES = 9
_SCALE = 0.02
# What a pass takes longer than its matrix products would at their best rate; at least.
_SLOWER = 2


@dataclass(frozen=True)
class Effort:
    """What passes of a model take.

    Attributes:
        weights: Bytes of its parameters.
        saved: Bytes that forward saves for backward, by micro-batch.
        flops: Floating-point operations of forward and backward, by micro-batch.
    """

    weights: int
    saved: Growth
    flops: Growth


@contextmanager
def timing_passes(
    study: ModelUnderStudy, effort: Effort, memory: int, param_dtype: Precision | None
) -> Iterator[Callable[[], PassTimes | None]]:
    """Within, a child process runs passes of some micro-batches and times them.

    The model gets parameters with values, whole: what it does there, and what memory it takes, ends with
    that process. Only on the host: an accelerator's memory may belong to ranks. The child counts the
    time of its own thread, so that others take nothing from it. It ends with the block.

    Args:
        study: The model.
        effort: Of its passes.
        memory: Bytes that may be taken.
        param_dtype: Of computation.

    Yields:
        Waits for what was found; None if that takes too much, or fails.
    """
    if study.device_type != "cpu":
        yield lambda: None
        return
    child, answers = _in_child(partial(_time_all, study, effort, memory, param_dtype))

    def found() -> PassTimes | None:
        # Not for the end of the pipe: what the model has started there may hold it open for ever.
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        os.set_blocking(answers.fileno(), False)
        answer = answers.read()
        if not answer:
            return None
        flops, *seconds = json.loads(answer)
        return PassTimes(tuple((int(m), f, b) for m, f, b in seconds), flops) if seconds else None

    try:
        with answers:
            yield found
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)


def _in_child(take: Callable[[], Sequence[object]]) -> tuple[int, BinaryIO]:
    """A process that writes what `take` returns, as JSON; nothing if it fails, or takes far too long."""
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        # Whatever happens, this process ends here: all else of it belongs to the parent.
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_GIVEN_UP_S)
            os.close(reading)
            if os.getppid() == parent:
                os.write(writing, json.dumps(take()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    return child, open(reading, "rb")  # noqa: PTH123 - a descriptor, and the caller's


def _time_all(
    study: ModelUnderStudy, effort: Effort, memory: int, param_dtype: Precision | None
) -> list[object]:
    torch.set_num_threads(1)
    rate = _reference_flops()
    model: nn.Module | None = None
    found: list[object] = [rate]
    began, size = time.perf_counter(), 1
    for _ in range(_MOST_SIZES):
        need = _GRADS_TOO * effort.weights + effort.saved.at(size)
        least = _SLOWER * effort.flops.at(size) / rate
        if _SLOWER * need > memory or least > _LONGEST_PASS_S:
            break
        if model is None:
            model = _with_values(study, param_dtype)
        # A batch of one may be too small for a model that normalises over it.
        with suppress(ValueError):
            took = _best(model, study, size)
            found.append((size, *took))
            if sum(took) > _LONGEST_PASS_S / _FACTOR:
                break
        if time.perf_counter() - began > _BUDGET_S:
            break
        size *= _FACTOR
    return found


def _with_values(study: ModelUnderStudy, param_dtype: Precision | None) -> nn.Module:
    """The model with parameters that are as large as those of one that was just initialised."""
    with torch.device("meta"), fakes.without_drawing_twice():
        model = study.make()
    model.to_empty(device=study.device_type)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(std=_SCALE)
            else:
                tensor.zero_()
    if param_dtype is not None:
        dtype = DTYPES[param_dtype]
        model.to(dtype)
        for module in model.modules():
            module.register_forward_pre_hook(partial(_cast, dtype), with_kwargs=True)
    return model


def _cast(dtype: torch.dtype, _: nn.Module, args: object, kwargs: object) -> object:
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))


def _best(model: nn.Module, study: ModelUnderStudy, size: int) -> tuple[float, float]:
    """Processor seconds of forward and backward: whoever else uses the processor adds nothing."""
    times = []
    for number in range(1 + _REPEATS):
        began = time.thread_time()
        loss = study.loss(model, size)
        between = time.thread_time()
        loss.backward()  # type: ignore[no-untyped-call]  # PyTorch's
        ended = time.thread_time()
        model.zero_grad(set_to_none=True)
        if number or ended - began > _LONGEST_PASS_S:
            times.append((between - began, ended - between))
        if ended - began > _LONGEST_PASS_S:
            break
    return min(times, key=sum)


def _reference_flops() -> float:
    left, right = torch.randn(2, REFERENCE_WIDTH, REFERENCE_WIDTH)
    product = torch.empty_like(left)
    best = float("inf")
    for _ in range(1 + _REPEATS):
        began = time.thread_time()
        torch.mm(left, right, out=product)
        best = min(best, time.thread_time() - began)
    return 2 * REFERENCE_WIDTH**3 / best
