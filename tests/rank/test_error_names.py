"""Names of classes travel as text: a renamed class must not turn a verdict around."""

import torch

from fsdp_core.errors import DesyncError
from services.contract.system.mask import Mask
from services.contract.words.bounds import ERROR_CHARACTERS
from services.controller.domain.decisions import diagnose
from services.worker.rank.checkpoints.writer import CheckpointWriteError
from services.worker.rank.loop.context import NonFiniteLossError
from services.worker.rank.process.failures import one_line, traceback_of
from services.worker.rank.process.host_memory import refusal_behind


def name(kind: type[BaseException]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def test_the_classes_that_verdicts_name_are_where_they_say() -> None:
    assert name(NonFiniteLossError) == diagnose.NON_FINITE_LOSS
    assert name(CheckpointWriteError) == diagnose._CHECKPOINT_WRITE
    assert name(DesyncError) == diagnose._DESYNC
    assert {name(MemoryError), name(torch.OutOfMemoryError)} == diagnose._MEMORY_TYPES


def test_an_error_that_cannot_say_what_it_is_is_told_by_its_name() -> None:
    class OfAnotherProcessError(Exception):
        def __str__(self) -> str:
            return f"{self.reason}"  # type: ignore[attr-defined]  # never set: it was unpickled

    error = OfAnotherProcessError()
    assert one_line(error) == "OfAnotherProcessError: its text cannot be had (AttributeError)"
    assert traceback_of(error).startswith("tests.rank.test_error_names.")
    assert refusal_behind(error) is None


def test_of_an_error_behind_thousands_of_others_the_last_is_told_and_the_first_is_found() -> None:
    error: Exception = MemoryError("the first")
    for number in range(20_000):
        following = ValueError(f"number {number}")
        following.__context__ = error
        error = following
    told = traceback_of(error)
    assert told.startswith("… 20000 exceptions that led to this one are left out")
    assert told.endswith("ValueError: number 19999\n")
    assert len(told) < 1_000
    assert isinstance(refusal_behind(error), MemoryError)


def test_a_secret_is_masked_before_the_line_is_cut_through_it() -> None:
    secret = "-".join(("value", "of", "the", "hub", "9"))
    for before in range(ERROR_CHARACTERS - 60, ERROR_CHARACTERS, 7):
        half = before // 2
        error = ValueError("x" * half + secret + "y" * before)
        told = one_line(error, Mask({"HUB": secret}))
        assert not any(secret[at : at + 6] in told for at in range(len(secret) - 6))
