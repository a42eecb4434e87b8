"""The store by which the ranks of a script meet: rank 0 hosts it from before the script begins.

torchrun's agent hosts it there, and so outlives every rank. Here rank 0's process does: it leaves
last.
"""

from datetime import timedelta
from typing import Final

import torch.distributed as dist

from services.contract.messages.rank_pipe import RankSeat

_MEETING_TIME: Final = timedelta(minutes=2)
_FOREVER: Final = timedelta(days=365)
_LEFT: Final = "meshloom/left"
_ALL_LEFT: Final = "meshloom/all-left"


class ScriptStore:
    """This rank's connection to it.

    Args:
        seat: Names rank, world and the store's address.
        listen_fd: On rank 0, the bound socket on which it listens.

    Raises:
        torch.distributed.DistError: Rank 0 could not be reached within two minutes.
    """

    def __init__(self, seat: RankSeat, listen_fd: int | None) -> None:
        self._is_host = seat.rank == 0
        self._world_size = seat.plan.world_size
        self._store = dist.TCPStore(  # type: ignore[attr-defined]  # PyTorch exports it implicitly
            seat.store_host,
            seat.store_port,
            self._world_size,
            is_master=self._is_host,
            timeout=_MEETING_TIME,
            wait_for_workers=False,
            master_listen_fd=listen_fd if self._is_host else None,
        )

    def part(self, name: str) -> dist.PrefixStore:  # type: ignore[name-defined]  # as above
        """The store for keys of ours of which the script knows nothing."""
        return dist.PrefixStore(f"meshloom/{name}", self._store)  # type: ignore[attr-defined]  # as above

    def leave(self) -> None:
        """This rank needs it no more; where it is hosted, returns once none does."""
        if self._store.add(_LEFT, 1) == self._world_size:
            self._store.set(_ALL_LEFT, "")
        if self._is_host:
            self._store.wait([_ALL_LEFT], _FOREVER)
