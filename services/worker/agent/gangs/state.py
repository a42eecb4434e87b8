"""What an agent knows of one gang on its node, and of each of its ranks there."""

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from services.contract.messages.base import Address
from services.contract.messages.findings import Findings
from services.contract.messages.rank_pipe import (
    RankFailed,
    RankFinished,
    RankReady,
)
from services.worker.agent.telemetry.hang import (
    Progress,
)

# What the survivors of a lost rank say: the consequence of a failure, never its cause.
_LOST_PEER: Final = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (is )?(closed|timeout)"
    r"|closed by (peer|remote)|remote process exited|unexpected eof|connectFullMesh|NCCL"
    # The first such word of a line, once and for all: an error may repeat it a thousand times.
    r"|^(?>.*?(gloo|store|rendezvous|watchdog|collective)).*(timed? ?out|connect)"
    r"|dist(network|store|backend)error"
    r"|^(?>.*?PeerError: Rank \d+ of group ).*(ended|has not taken part)",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True)
class RankState:
    """One rank as its agent knows it.

    ``arrived`` is the place of its first failure or exit among those of the gang, None before.
    ``killed``: by us, while it was well. ``held``: the kernel does not let it end. ``misbehaved``: it
    did what no rank of ours does; what it says from then on counts for nothing. ``voted``: the step of the
    last checkpoint for which it voted.
    """

    rank: int
    pid: int
    ready: RankReady | None = None
    failed: RankFailed | None = None
    finished: RankFinished | None = None
    spoke_last_at: float = 0.0
    step_seen: bool = False
    killed: bool = False
    held: bool = False
    misbehaved: bool = False
    voted: int = -1
    exit_code: int | None = None
    signal: int | None = None
    arrived: int | None = None

    @property
    def ended(self) -> bool:
        """Whether the process is reaped, or is not waited for any more."""
        return self.exit_code is not None or self.signal is not None

    @property
    def echoes(self) -> bool:
        """Whether its failure says that a peer was lost, or is the abort that follows."""
        if self.failed is not None:
            return _LOST_PEER.search(self.failed.error) is not None
        return self.signal == signal.SIGABRT


@dataclass(frozen=True)
class GangState:
    """All ranks of one attempt on this node, by number.

    ``progressed`` is the first step that all have made. ``storage_root``: below which they write.
    ``resume_from`` is the checkpoint that its ranks load, ``began`` the step of the last one that
    any of them began to write. ``hang_timeout_s`` is the spec's, None for auto. ``hung_at`` is when
    the ranks were found to hang, and ``hang`` what was found then. ``waited_at`` is when a rank last
    said that it waits for room on the disk: it makes no progress then, and those that have finished
    wait for it. ``is_script``: its ranks run a script: they make steps only as far as it reports them,
    and an exit with code 0 is its end, however it left. ``tracing``: by rank, the trace that it was told
    to record and has said nothing of yet; ``traces``: all that ranks here were told to record.
    ``replica_size``: how many ranks a replica has that may be lost alone; None: the gang ends with any
    of its ranks. ``members``: the replicas that take part, wherever they are, by the set with number
    ``epoch``; ``lives``: how often each was launched here; ``lost``: those here that are dead and were not
    launched again; ``stores``: where the first rank of each listens.
    """

    job_id: str
    fence: int
    node_id: str
    ranks: Mapping[int, RankState]
    storage_root: Path = Path()
    resume_from: str | None = None
    words: int = 0
    progressed: int | None = None
    began: int = -1
    kill_at: float | None = None
    echo_until: float | None = None
    stopped: str | None = None
    hang_timeout_s: float | None = None
    is_script: bool = False
    progress: Progress = field(default_factory=Progress)
    hung_at: float | None = None
    hang: Findings | None = None
    waited_at: float = 0.0
    tracing: Mapping[int, str] = field(default_factory=dict)
    traces: frozenset[str] = frozenset()
    replica_size: int | None = None
    epoch: int = 0
    members: tuple[int, ...] = ()
    lives: Mapping[int, int] = field(default_factory=dict)
    lost: frozenset[int] = frozenset()
    stores: Mapping[int, Address] = field(default_factory=dict)

    def replica_of(self, rank: int) -> Mapping[int, RankState]:
        """The ranks of the replica of ``rank``, by number."""
        size = self.replica_size or len(self.ranks)
        return {n: each for n, each in self.ranks.items() if n // size == rank // size}

    @property
    def is_looking(self) -> bool:
        """Whether its ranks hang and are being looked into.

        They are killed right after. Whoever else wants them dead waits so long: on other nodes of
        the gang the ranks hang too, and only here it may be seen why.
        """
        return self.hung_at is not None and self.hang is None

    @property
    def ended(self) -> bool:
        """Whether every rank is reaped, and none comes back."""
        if not all(rank.ended for rank in self.ranks.values()):
            return False
        is_done = any(rank.finished is not None for rank in self.ranks.values())
        return not self.lost or is_done or self.stopped is not None
