"""The connections of an epoch: groups in which replicas exchange what they have, beside any world.

The set's number is in the prefix under which groups meet: a replica that is no member has no part in them.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Protocol, cast

import torch
import torch.distributed as dist

from services.contract.messages.rank_pipe import ReplicaSet

_PAUSE_S: Final = 0.005
_MEETS_WITHIN: Final = timedelta(seconds=20)
_AT_ONCE: Final = timedelta(milliseconds=1)
_NO_TAG: Final = 1 << 20  # with which nothing is sent
LASTS: Final = timedelta(days=7)
"""How long a collective may take: a member may evaluate, or write its last checkpoint."""


class MembersChangedError(Exception):
    """A member of the epoch is gone, or the controller says so: nothing more can be exchanged in it."""


class Group(Protocol):
    """What is used of a gloo group that is in no world; PyTorch documents the calls."""

    def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions) -> dist.Work:
        """Sums in place, of all members."""
        ...

    def allgather(
        self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor]
    ) -> dist.Work:
        """One output for each member."""
        ...

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> dist.Work:
        """From the root that the options name."""
        ...

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        """From one member."""
        ...

    def rank(self) -> int:
        """This member's number."""
        ...

    def size(self) -> int:
        """How many members there are."""
        ...

    def abort(self) -> None:
        """Closes its connections."""
        ...

    def _set_default_timeout(self, timeout: timedelta) -> None: ...


@dataclass(frozen=True)
class EpochGroups:
    """The groups of an epoch: of the ranks of this place, and of all ranks of all members."""

    peers: Group
    all: Group
    store: Any
    others: list[Group] = field(default_factory=list)

    @classmethod
    def meet(
        cls,
        wanted: ReplicaSet,
        own: tuple[int, int, int],
        fence: int,
        is_current: Callable[[ReplicaSet, float], bool],
    ) -> "EpochGroups":
        """Connects with all members of ``wanted``.

        Args:
            wanted: Names the members, and where their store is.
            own: Replica, place within it, and ranks of a replica.
            fence: The attempt's.
            is_current: Whether it can still be entered; waits so many seconds for news.

        Raises:
            MembersChangedError: A member does not come, or the set is no longer current.
        """
        replica, place, size = own
        members = wanted.members
        row, count = members.index(replica), len(members)
        try:
            server = dist.TCPStore(  # type: ignore[attr-defined]  # PyTorch exports it implicitly
                wanted.host, wanted.port, timeout=_MEETS_WITHIN, wait_for_workers=False
            )
            prefix = f"attempt-{fence}/epoch-{wanted.epoch}"
            store = dist.PrefixStore(prefix, server)  # type: ignore[attr-defined]  # as above
            # One that dies before it comes would be waited for until the time is up.
            store.set(f"here/{replica}/{place}", "")
            names = [f"here/{member}/{at}" for member in members for at in range(size)]
            while not store.check(names):
                if not is_current(wanted, _PAUSE_S):
                    raise MembersChangedError
            everyone = _gloo(f"all/{prefix}", store, row * size + place, count * size)
            if size == 1:
                return cls(everyone, everyone, store)
            return cls(_gloo(f"place-{place}", store, row, count), everyone, store)
        except (RuntimeError, dist.DistError) as error:
            raise MembersChangedError from error

    @staticmethod
    def reduce(group: Group, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> dist.Work:
        """Begins to reduce ``tensor`` in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        options.timeout = LASTS
        return group.allreduce([tensor], options)

    def further(self, name: str, rank: int, size: int) -> Group:
        """One more group of some of the ranks."""
        self.others.append(_gloo(name, self.store, rank, size))
        return self.others[-1]

    def abort(self) -> None:
        """Closes all connections: whoever waits in a collective is freed, here and elsewhere."""
        groups = (self.all, self.peers, *self.others)
        for group in {id(each): each for each in groups}.values():
            _close(group)
            group.abort()


def _close(group: Group) -> None:
    """Ends what still runs in a group, also what waits for a process that is stopped or cut off.

    ``abort`` alone leaves it running, and the end of the group would wait for it. When a receive runs
    out of time, gloo closes all connections of the group.
    """
    for other in range(group.size()):
        if other != group.rank():
            # Of a connection that is closed already the error comes at once, and closes no other.
            with contextlib.suppress(RuntimeError):
                group.recv([torch.zeros(1)], other, _NO_TAG).wait(_AT_ONCE)


def _gloo(name: str, store: Any, rank: int, size: int) -> Group:  # noqa: ANN401 stores have no public type
    # Not a group of the default world: that is the replica's own.
    own = dist.PrefixStore(name, store)  # type: ignore[attr-defined]  # PyTorch exports it implicitly
    group = cast("Group", dist.ProcessGroupGloo(own, rank, size, _MEETS_WITHIN))
    group._set_default_timeout(LASTS)  # noqa: SLF001 the only way to set it later
    return group
