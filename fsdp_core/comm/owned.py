"""Parameters that one rank of the shard axis holds whole."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Owned:
    """What `shard_placement_fn` returns for a parameter that is not to be cut.

    For optimizers that need whole matrices, such as Muon and Shampoo: one rank holds the
    parameter, its whole gradient arrives there alone, and only that rank updates it. While
    modules compute it is whole everywhere, as any other.

    Attributes:
        rank: Place of the owner on the shard axis. None: owners of the unit's parameters are
            chosen such that each owns about as much. With fewer of them than ranks the first
            ranks own them, in every unit: then name the owners, to spread the units.

    Clip with `fsdp_core.clip_grad_norm_`; PyTorch's refuses. `torch.amp.GradScaler` sees an
    overflow in an owned gradient on its owner only: with it, shard the parameter instead.
    """

    rank: int | None = None
