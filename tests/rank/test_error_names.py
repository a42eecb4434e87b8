"""Names of classes travel as text: a renamed class must not turn a verdict around."""

import torch

from fsdp_core.errors import DesyncError
from services.controller.domain.decisions import diagnose
from services.worker.rank.checkpoints.writer import CheckpointWriteError
from services.worker.rank.loop.context import NonFiniteLossError


def name(kind: type[BaseException]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def test_the_classes_that_verdicts_name_are_where_they_say() -> None:
    assert name(NonFiniteLossError) == diagnose.NON_FINITE_LOSS
    assert name(CheckpointWriteError) == diagnose._CHECKPOINT_WRITE
    assert name(DesyncError) == diagnose._DESYNC
    assert {name(MemoryError), name(torch.OutOfMemoryError)} == diagnose._MEMORY_TYPES
