"""How replicas of which one may be lost go on together: epochs, sums, votes, state.

A replica is a world of its own; what replicas exchange, they exchange here, on the host. Who takes part
is a ``ReplicaSet``, which the controller decides and each rank's agent sends; its number is its epoch.

A member that dies breaks the groups for the others, at different places. Each then leaves the groups
(``abort`` closes their connections, which frees whoever still waits), and joins those of the next set.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Final, Protocol

import torch
import torch.distributed as dist

from services.contract.messages.rank_pipe import (
    RankEpochBroken,
    RankMessage,
    RankOrder,
    RankSeat,
    ReplicaSet,
)
from services.contract.words.states import RankPhase
from services.worker.rank.gang.replica_groups import LASTS, EpochGroups, Group, MembersChangedError

_LOOK: Final = timedelta(milliseconds=100)
_MOMENT_S: Final = 1.0
_LOSS_TOLD_WITHIN_S: Final = 5.0
"""Within this time a loss is told of; then the connections broke by themselves."""
_NO_STATE: Final = -1
_PART_BYTES: Final = 1 << 26


class OrderPipe(Protocol):
    """Where orders come from, and reports go."""

    def send(self, message: RankMessage) -> None:
        """Report to the agent."""
        ...

    def poll_orders(self, within_s: float = 0.0) -> list[RankOrder]:
        """What came; waits so long for it, if nothing is there."""
        ...


class PhaseWatch(Protocol):
    """Is told what the rank does."""

    def enter(self, phase: RankPhase) -> None:
        """It begins ``phase``."""
        ...


class Orders:
    """The orders of a rank's agent: the newest set of replicas, and all others until they are taken.

    Args:
        pipe: Where they come from.
    """

    def __init__(self, pipe: OrderPipe) -> None:
        self._pipe = pipe
        self._others: list[RankOrder] = []
        self.newest: ReplicaSet | None = None

    def poll(self, within_s: float = 0.0) -> None:
        """Takes in what came, and waits so long for it."""
        for order in self._pipe.poll_orders(within_s):
            told = order.replicas
            if told is None:
                self._others.append(order)
            elif self.newest is None or told.epoch > self.newest.epoch:
                self.newest = told

    def report_broken(self, epoch: int) -> None:
        """The connections of an epoch broke, and no newer one was told of."""
        self._pipe.send(RankEpochBroken(epoch=epoch))

    def take(self) -> list[RankOrder]:
        """All that say nothing of replicas and were not taken before."""
        self.poll()
        taken, self._others = self._others, []
        return taken


@dataclass(frozen=True)
class Ballot:
    """What a rank says as a step's sums are there, and what all ranks of all members then do.

    Attributes:
        epoch: The newest set that it was told of; of all: which all were told of.
        newest: Of all: which any was told of.
        checkpoint: Whether it was asked for one.
        stop: Whether it was asked to stop.
    """

    epoch: int = 0
    checkpoint: bool = False
    stop: bool = False
    newest: int = 0


@dataclass(frozen=True)
class Standing:
    """Where a member stands as an epoch begins: steps made, and what was decided with the last."""

    made: int
    checkpoint: bool = False
    stop: bool = False


class Replicas:
    """This rank among those of other replicas.

    Args:
        seat: Names rank, plan and attempt.
        orders: Say who takes part.
        watch: Told while the rank waits for that.
    """

    def __init__(self, seat: RankSeat, orders: Orders, watch: PhaseWatch) -> None:
        self._fence = seat.fence
        self._size = seat.plan.replica_size
        self.number, self._place = divmod(seat.rank, self._size)
        self._orders = orders
        self._watch = watch
        self._set: ReplicaSet | None = None
        self._has_state = not seat.returns
        self._giver: int | None = None
        self._joining: tuple[int, ...] = ()
        self._groups: EpochGroups | None = None
        self._pair: Group | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """The replicas that take part, ascending."""
        return self._known.members

    @property
    def epoch(self) -> int:
        """The number of the set."""
        return self._known.epoch

    @property
    def is_joining(self) -> bool:
        """Whether this replica gets its state in this epoch."""
        return self.number in self._joining

    @property
    def sends(self) -> bool:
        """Whether this replica gives its state to others in this epoch."""
        return self.number == self._giver and bool(self._joining)

    @property
    def is_first(self) -> bool:
        """Whether this replica is the one that writes and reports."""
        return self.number == min(self.members)

    def enter(self, standing: Standing) -> Sequence[Standing]:
        """Enters the newest epoch, waits for one that is newer than the present one if there is none.

        Args:
            standing: Of this rank.

        Returns:
            That of all ranks that have the state.
        """
        self._watch.enter(RankPhase.RENDEZVOUS)
        while True:
            self.leave()
            wanted = self._newer()
            try:
                self._groups = EpochGroups.meet(
                    wanted, (self.number, self._place, self._size), self._fence, self._is_current
                )
                self._set = wanted
                return self._compare(standing)
            except MembersChangedError:
                self._set = wanted

    def sum(self, gradients: torch.Tensor, figures: torch.Tensor) -> None:
        """Adds up in place: gradients over the ranks of this place, figures over all ranks.

        Raises:
            MembersChangedError: A member is gone. Both are not to be used.
        """
        groups = self._open
        for group, tensor in ((groups.peers, gradients), (groups.all, figures)):
            self._wait(partial(groups.reduce, group, tensor, dist.ReduceOp.SUM))

    def vote(self, ballot: Ballot) -> Ballot:
        """What all ranks do, if all have cast: each does so once it has the sums of the step.

        Raises:
            MembersChangedError: A member is gone. Others may know the outcome.
        """
        words = [ballot.epoch, -ballot.checkpoint, -ballot.stop, -ballot.epoch]
        cast = torch.tensor(words, dtype=torch.int64)
        groups = self._open
        self._wait(partial(groups.reduce, groups.all, cast, dist.ReduceOp.MIN))
        epoch, checkpoint, stop, newest = cast.tolist()
        return Ballot(epoch, bool(checkpoint), bool(stop), -newest)

    def told_epoch(self) -> int:
        """The newest set that this rank was told of."""
        self._orders.poll()
        return self._orders.newest.epoch if self._orders.newest is not None else 0

    def send_state(self, text: bytes, tensors: Sequence[torch.Tensor]) -> None:
        """Sends this rank's state to the ranks of its place in all replicas that join.

        Raises:
            MembersChangedError: A member is gone.
        """
        texts = self._told_here(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        for replica in self._joining:
            self._meet_alone_with(self.number, replica)
            for told in texts:
                self._pass_on(torch.tensor([told.numel()]))
                self._pass_parts_on(told)
            for tensor in tensors:
                self._pass_parts_on(tensor)

    def note_state(self) -> None:
        """This rank has got its state."""
        self._has_state = True

    def receive_texts(self) -> list[bytes]:
        """The text of the state that another replica sends, and those of the other ranks there.

        Raises:
            MembersChangedError: A member is gone.
        """
        if self._giver is None:
            raise MembersChangedError
        self._meet_alone_with(self._giver, self.number)
        texts = []
        for _ in range(self._size):
            length = torch.zeros(1, dtype=torch.int64)
            self._pass_on(length)
            text = torch.empty(int(length), dtype=torch.uint8)
            self._pass_parts_on(text)
            texts.append(text.numpy().tobytes())
        return texts

    def receive_tensor(self, into: torch.Tensor) -> None:
        """The next tensor of it: one dim, on the host.

        Raises:
            MembersChangedError: A member is gone.
        """
        self._pass_parts_on(into)

    def part(self) -> bool:
        """Whether all ranks of all members are here, and none was told of a newer set.

        Raises:
            MembersChangedError: A member is gone. Others may have parted.
        """
        told = self.vote(Ballot(self.told_epoch()))
        return told.newest <= self.epoch

    def _compare(self, standing: Standing) -> Sequence[Standing]:
        own = standing.made if self._has_state else _NO_STATE
        row = torch.tensor([own, standing.checkpoint, standing.stop], dtype=torch.int64)
        rows = [torch.zeros_like(row) for _ in range(len(self.members) * self._size)]
        self._wait(partial(self._open.all.allgather, [rows], [row]))
        told = [each.tolist() for each in rows]
        without = {place // self._size for place, each in enumerate(told) if each[0] == _NO_STATE}
        having = [place for place in range(len(self.members)) if place not in without]
        if not having:
            raise RuntimeError("no replica that is left has the state: all that had it are lost")
        self._joining = tuple(self.members[place] for place in sorted(without))
        self._giver = self.members[having[0]]
        return [Standing(made, bool(save), bool(stop)) for made, save, stop in told if made >= 0]

    def _meet_alone_with(self, giver: int, receiver: int) -> None:
        """A group of the ranks of this place in two replicas: what one sends is the others' to skip."""
        name = f"state-{giver}-{receiver}/{self._place}"
        self._pair = self._met(name, int(self.number == receiver), 2)

    def _met(self, name: str, rank: int, size: int) -> Group:
        try:
            return self._open.further(name, rank, size)
        except RuntimeError as error:
            self.leave()
            raise MembersChangedError from error

    def _told_here(self, own: torch.Tensor) -> list[torch.Tensor]:
        """The texts of all ranks of this replica, that of this rank first."""
        if self._size == 1:
            return [own]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
        replica = self._met(f"replica-{self.number}", self._place, self._size)
        self._wait(partial(replica.allgather, [sizes], [torch.tensor([own.numel()])]))
        longest = max(int(size) for size in sizes)
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self._size)]
        padded = torch.nn.functional.pad(own, (0, longest - own.numel()))
        self._wait(partial(replica.allgather, [texts], [padded]))
        cut = [text[: int(size)] for text, size in zip(texts, sizes, strict=True)]
        return [cut[self._place], *cut[: self._place], *cut[self._place + 1 :]]

    def _pass_parts_on(self, tensor: torch.Tensor) -> None:
        for start in range(0, tensor.numel(), _PART_BYTES):
            self._pass_on(tensor[start : start + _PART_BYTES])

    def _pass_on(self, part: torch.Tensor) -> None:
        # No send and no recv: a wait for one that times out closes all connections of its group.
        if self._pair is None:
            raise MembersChangedError
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = LASTS
        self._wait(partial(self._pair.broadcast, [part], options))

    @property
    def _known(self) -> ReplicaSet:
        if self._set is None:
            raise RuntimeError("no set of replicas was entered yet")
        return self._set

    @property
    def _open(self) -> EpochGroups:
        if self._groups is None:
            raise MembersChangedError
        return self._groups

    def _newer(self) -> ReplicaSet:
        began, is_reported = time.monotonic(), self._set is None
        while True:
            self._orders.poll()
            newest = self._orders.newest
            if newest is not None and (self._set is None or newest.epoch > self._set.epoch):
                if self.number in newest.members:
                    return newest
                raise RuntimeError(
                    f"replica {self.number} is no member of epoch {newest.epoch} of its attempt: it "
                    "was given up for lost"
                )
            if not is_reported and time.monotonic() - began >= _LOSS_TOLD_WITHIN_S:
                is_reported = True
                self._orders.report_broken(self._known.epoch)
            self._orders.poll(_MOMENT_S)

    def _is_current(self, wanted: ReplicaSet, within_s: float = 0.0) -> bool:
        """Whether an epoch can still be entered: none without one of its members was told of."""
        self._orders.poll(within_s)
        newest = self._orders.newest
        return newest is None or set(wanted.members) <= set(newest.members)

    def _wait(self, start: Callable[[], dist.Work]) -> None:
        work: dist.Work | None = None
        while True:
            began = time.monotonic()
            try:
                if work is None:
                    work = start()
                work.wait(_LOOK)
            except RuntimeError as error:
                # A time-out leaves the collective running; anything else has ended it at once.
                is_broken = work is None or time.monotonic() - began < _LOOK.total_seconds() / 2
                if is_broken or not self._is_current(self._known):
                    self.leave()
                    raise MembersChangedError from error
            else:
                return

    def leave(self) -> None:
        """Leaves the groups of the epoch, which frees whoever waits in them."""
        if self._groups is not None:
            self._groups.abort()
            self._groups = None
