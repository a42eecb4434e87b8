"""Tensors of one name that each rank has whole, and whose values may differ: no slices of a common one.

Such are the statistics of a batch norm, and what an optimizer keeps of the slices that it computes with. Of
those that are the same everywhere rank 0 saves the only one. Of the others each rank saves its own, for the
rank of the same place on the same mesh; on another mesh all take that of rank 0, but no optimizer does.
"""

import hashlib
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_core.checkpoint import SavedShard
from fsdp_core.errors import CheckpointError
from services.worker.rank.gang.groups import Gang

PREFIX: Final = "own."
"""Begins the names of such tensors in the files of all ranks but the first."""
_DIGEST_BYTES: Final = 8


class HasParts(Protocol):
    """Where saved tensors are read."""

    def part(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """A part of one."""
        ...


def differing(state: Mapping[str, torch.Tensor], gang: Gang) -> list[str]:
    """Names of this rank's tensors that another rank has with other values, or has not; all ranks call it.

    Raises:
        RuntimeError: A rank is gone.
    """
    if gang.world_size == 1:
        return []
    whole = {name: each for name, each in state.items() if not isinstance(each, DTensor)}
    kinds = {
        name: f"{name} {each.dtype} {tuple(each.shape)}".encode(errors="surrogatepass")
        for name, each in whole.items()
    }
    everywhere = list(whole)
    if not gang.control.agree_on(hashlib.sha256(b"\n".join(kinds.values())).digest()):
        everywhere = _on_all_ranks(kinds, gang)
    digests = torch.tensor([_digest(whole[name]) for name in everywhere], dtype=torch.int64)
    low = gang.control.all_reduce(digests.clone(), dist.ReduceOp.MIN).wait()
    high = gang.control.all_reduce(digests, dist.ReduceOp.MAX).wait()
    same = set(itertools.compress(everywhere, (low == high).tolist()))
    return [name for name in whole if name not in same]


def _on_all_ranks(kinds: Mapping[str, bytes], gang: Gang) -> list[str]:
    """The names of which all ranks have the same kind, in an order that is the same on all."""
    own = {name: _number(kind) for name, kind in kinds.items()}
    counts = torch.zeros(gang.world_size, dtype=torch.int64)
    counts[gang.rank] = len(own)
    counts = gang.control.all_reduce(counts).wait()
    table = torch.zeros(gang.world_size, int(counts.max()), dtype=torch.int64)
    table[gang.rank, : len(own)] = torch.tensor(list(own.values()), dtype=torch.int64)
    rows = gang.control.all_reduce(table).wait().tolist()
    common = set.intersection(
        *(set(row[:count]) for row, count in zip(rows, counts.tolist(), strict=True))
    )
    return sorted((name for name in own if own[name] in common), key=own.__getitem__)


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
    return _number(
        tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    )


def _number(content: bytes) -> int:
    digest = hashlib.sha256(content).digest()
    return int.from_bytes(digest[:_DIGEST_BYTES], "little", signed=True)
