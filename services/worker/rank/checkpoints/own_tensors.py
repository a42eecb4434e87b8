"""Tensors of one name that each rank has whole, and whose values may differ: no slices of a common one.

Such are the statistics of a batch norm, and what an optimizer keeps of the slices that it computes with. Of
those that are the same everywhere rank 0 saves the only one. Of the others each rank saves its own, for the
rank of the same place on the same mesh; on another mesh all take that of rank 0, but no optimizer does.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch.distributed.tensor import DTensor

from fsdp_core.checkpoint import SavedShard
from fsdp_core.errors import CheckpointError
from services.worker.rank.gang.control import ControlChannel

PREFIX: Final = "own."
"""Begins the names of such tensors in the files of all ranks but the first."""
_DIGEST_BYTES: Final = 8


class HasParts(Protocol):
    """Where saved tensors are read."""

    def part(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """A part of one."""
        ...


def differing(state: Mapping[str, torch.Tensor], control: ControlChannel) -> list[str]:
    """Names of this rank's tensors that another rank has with other values, or has not; all ranks call it.

    Raises:
        RuntimeError: A rank is gone.
    """
    whole = {name: each for name, each in state.items() if not isinstance(each, DTensor)}
    about = [f"{name} {each.dtype} {tuple(each.shape)}" for name, each in whole.items()]
    if not control.agree_on(hashlib.sha256("\n".join(about).encode()).digest()):
        return list(whole)
    digests = torch.tensor([_digest(each) for each in whole.values()], dtype=torch.int64)
    low = control.all_reduce(digests.clone(), torch.distributed.ReduceOp.MIN).wait()
    high = control.all_reduce(digests, torch.distributed.ReduceOp.MAX).wait()
    return [
        name for name, is_same in zip(whole, (low == high).tolist(), strict=True) if not is_same
    ]


def own_shards(
    reader: HasParts, shapes: Mapping[str, Sequence[int]], *, is_first: bool
) -> Iterable[SavedShard]:
    """What a rank saved of its own, each under the name that it has in the state.

    Args:
        reader: Of the file that the rank saved.
        shapes: By name.
        is_first: Whether it is rank 0, which saves them as what all have.
    """
    for name, shape in shapes.items():
        kept = name if is_first else PREFIX + name
        yield SavedShard(
            fqn=name,
            global_shape=tuple(shape),
            offsets=(0,) * len(shape),
            shape=tuple(shape),
            read=lambda slices, kept=kept: reader.part(kept, slices),  # type: ignore[misc]  # mypy cannot type a default in a lambda
        )


def refuse_elsewhere(names: Collection[str], optimizer: str, mesh: Mapping[str, Any]) -> None:
    """Refuse another mesh where an optimizer keeps what differs between ranks: no rank has any of it there.

    Args:
        names: Of what differs.
        optimizer: Begins the names of optimizers' state.
        mesh: On which it was saved.

    Raises:
        CheckpointError: There is such state.
    """
    if found := sorted(name for name in names if name.startswith(optimizer)):
        raise CheckpointError(
            f"the optimizer keeps {found[0]} as a plain tensor with other values on each rank, so it goes on only on the "
            f"mesh on which it was saved, {dict(mesh)}. Keep it as a DTensor, as torch.zeros_like(parameter) is"
        )


def _digest(tensor: torch.Tensor) -> int:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    digest = hashlib.sha256(content).digest()
    return int.from_bytes(digest[:_DIGEST_BYTES], "little", signed=True)
