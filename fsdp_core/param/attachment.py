"""What the engine notes on parameters themselves."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

import torch


class Attachment:
    """Base of such a note, of which a parameter has at most one of each kind.

    It hangs on the parameter itself: a weak reference would forbid PyTorch to swap the tensor,
    and an identity could be another tensor's later. Copies of the parameter, and those that come
    out of files, are not the engine's: something empty stands in the note's place, of a class
    that `torch.load` takes without being told to trust the file.
    """

    def __reduce__(self) -> tuple[type[OrderedDict[str, object]], tuple[()]]:
        return OrderedDict, ()


Kind = TypeVar("Kind", bound=Attachment)


def attach(parameter: torch.Tensor, note: Attachment) -> None:
    """Hangs `note` on the parameter, in the place of an older one of its kind."""
    parameter.__dict__[_name(type(note))] = note


def attached(parameter: torch.Tensor, kind: type[Kind]) -> Kind | None:
    """The parameter's note of this kind; None if it has none."""
    found = parameter.__dict__.get(_name(kind))
    return found if isinstance(found, kind) else None


def inherit(old: torch.Tensor, new: torch.Tensor) -> None:
    """Hangs the notes of `old` on `new`, which takes its place."""
    for note in list(old.__dict__.values()):
        if isinstance(note, Attachment):
            attach(new, note)


def _name(kind: type[Attachment]) -> str:
    return f"_fsdp_core_{kind.__name__}"
