"""Where a node's files lie: one folder an attempt, its boards on tmpfs, and who may use them.

::

    <home>/nodes/<node id>/agent.lock
    <home>/nodes/<node id>/incarnation
    <home>/nodes/<node id>/warm.log
    <home>/nodes/<node id>/sentinel.log
    <home>/nodes/<node id>/measured-<device type>.json
    <home>/nodes/<node id>/code/    see ``code_cache``
    <home>/nodes/<node id>/jobs/<job id>/attempt-<fence>/
        launched.json     made before the first fork: an attempt is launched once, ever
        telemetry-name    of its job in Redis, where that is a secret
        ended.json        the fact that told its end
        metrics.jsonl, tensorboard/events.out.tfevents.<fence>…   what rank 0 reports
        rank-<r>.stdout.log, rank-<r>.stderr.log, and with .1 what was before, where it was cut
    /dev/shm/meshloom-<mark>-<uid>/<job id>-<fence>/rank-<r>.board
"""

import contextlib
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, TypeAdapter

from services.contract.jobs.plans import RankPlacement
from services.contract.messages.board import BoardReader
from services.contract.messages.facts import GangEnded, LaunchRefused
from services.contract.redis.redis_keys import is_telemetry_name
from services.contract.system.durable import append_plain, read_plain, replace_plain
from services.worker.agent.host.removal import remove_what_can_be

ATTEMPTS_KEPT: Final = 20
_TELEMETRY_NAME: Final = "telemetry-name"
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 private: made with mode 700, owner checked
_PLACEMENTS: Final = TypeAdapter(tuple[RankPlacement, ...])
_ENDS: Final[TypeAdapter[GangEnded | LaunchRefused]] = TypeAdapter(
    Annotated[GangEnded | LaunchRefused, Field(discriminator="kind")]
)


class NodeBusyError(Exception):
    """Another agent works in this node's folder."""


class NoHomeError(Exception):
    """The node's folder cannot be made or written to; the message says where and why."""


class NoBoardsError(OSError):
    """The shared memory has no room for boards."""


class AttemptFolder:
    """The files of one attempt of a job on this node."""

    def __init__(self, path: Path, boards: Path) -> None:
        self.path = path
        self.boards = boards

    @property
    def job_id(self) -> str:
        """The attempt's job."""
        return self.path.parent.name

    @property
    def fence(self) -> int:
        """The attempt's number."""
        return int(self.path.name.removeprefix("attempt-"))

    def log(self, rank: int, stream: Literal["stdout", "stderr"]) -> Path:
        """What a rank writes."""
        return self.path / f"rank-{rank}.{stream}.log"

    def board(self, rank: int) -> Path:
        """Where a rank shows where it stands."""
        return self.boards / f"rank-{rank}.board"

    def open(
        self, placements: tuple[RankPlacement, ...], telemetry_name: str | None = None
    ) -> dict[int, BoardReader] | None:
        """Make the folders and record the launch; None where it was recorded before.

        Answers the boards of these ranks, by rank.

        Args:
            placements: The ranks.
            telemetry_name: For an agent that comes after this one: see ``telemetry_name``. Unset: the job's id.

        Raises:
            NoBoardsError: There is no room for the boards of these ranks.
            OSError: The disk refuses.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if telemetry_name not in {None, self.job_id}:
            replace_plain(self.path / _TELEMETRY_NAME, telemetry_name.encode())
        try:
            with (self.path / "launched.json").open("xb") as file:
                file.write(_PLACEMENTS.dump_json(placements))
        except FileExistsError:
            return None
        made: dict[int, BoardReader] = {}
        try:
            # What lies there is of no launch: ranks of other jobs can put files into the way of this one.
            remove_what_can_be(self.boards)
            self.boards.mkdir(parents=True, exist_ok=True)
            for placement in placements:
                made[placement.rank] = BoardReader.make(self.board(placement.rank))
        except OSError as error:
            for board in made.values():
                board.close()
            raise NoBoardsError(error.errno, error.strerror, str(self.boards)) from error
        return made

    def renew_boards(self, ranks: tuple[int, ...]) -> dict[int, BoardReader]:
        """New boards for ranks that are started again; those of the dead stay with whoever has them open.

        Raises:
            OSError: There is no room for them.
        """
        made: dict[int, BoardReader] = {}
        try:
            for rank in ranks:
                self.board(rank).unlink(missing_ok=True)
                made[rank] = BoardReader.make(self.board(rank))
        except OSError:
            for board in made.values():
                board.close()
            raise
        return made

    def placements(self) -> tuple[RankPlacement, ...]:
        """The ranks that were launched; none where the launch was not recorded whole."""
        try:
            return _PLACEMENTS.validate_json(read_plain(self.path / "launched.json"))
        except (OSError, ValueError):
            return ()

    def telemetry_name(self) -> str:
        """Under which name the job's telemetry is in Redis; its id where nothing else makes sense."""
        try:
            name = read_plain(self.path / _TELEMETRY_NAME).decode()
        except (OSError, ValueError):
            return self.job_id
        return name if is_telemetry_name(self.job_id, name) else self.job_id

    def close(self, fact: GangEnded | LaunchRefused) -> None:
        """Record how the attempt ended here, or that it never began."""
        self.path.mkdir(parents=True, exist_ok=True)
        replace_plain(self.path / "ended.json", fact.model_dump_json(indent=1).encode())

    def ended(self) -> GangEnded | LaunchRefused | None:
        """How the attempt ended here; None while that is not recorded."""
        try:
            return _ENDS.validate_json(read_plain(self.path / "ended.json"))
        except (OSError, ValueError):
            return None

    def remove_boards(self) -> None:
        """Free the boards' memory."""
        remove_what_can_be(self.boards)


class NodeFolder:
    """The files of one node.

    Args:
        home: ``MESHLOOM_HOME``, absolute.
        node_id: The node.
        shared_memory: A tmpfs for the boards; beside the logs where it cannot be used safely.
    """

    def __init__(self, home: Path, node_id: str, shared_memory: Path = _SHARED_MEMORY) -> None:
        self.path = home / "nodes" / node_id
        digest = hashlib.sha256(os.fsencode(home.resolve())).hexdigest()[:12]
        self.mark = f"{node_id}-{digest}"
        self._shared_memory = shared_memory

    @property
    def warm_log(self) -> Path:
        """What the warm process writes."""
        return self.path / "warm.log"

    @property
    def template_socket(self) -> Path:
        """Where a template whose agent is gone waits for the next one."""
        return self.path / "template.sock"

    @property
    def sentinel_log(self) -> Path:
        """What the sentinel writes: nothing, unless it fails."""
        return self.path / "sentinel.log"

    @property
    def code(self) -> Path:
        """Where uploaded code lies."""
        return self.path / "code"

    def measured(self, device_type: str) -> Path:
        """What the node's devices of a type do in a second."""
        return self.path / f"measured-{device_type}.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only agent of this folder until the block ends; a death ends it too.

        Raises:
            NodeBusyError: Another one is.
            NoHomeError: There cannot be one.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = append_plain(self.path / "agent.lock")
        except OSError as error:
            raise NoHomeError(f"MESHLOOM_HOME: {self.path} cannot be used: {error}") from error
        with os.fdopen(lock, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise NodeBusyError(
                    f"another agent works in {self.path}; stop it, or set MESHLOOM_NODE_ID "
                    "or MESHLOOM_HOME to run a second one on this machine"
                ) from None
            yield

    def previous_incarnation(self) -> str | None:
        """The incarnation of the agent that worked here last; None where nothing plain says it."""
        try:
            return read_plain(self.path / "incarnation").decode(errors="replace")
        except OSError:
            return None

    def record_incarnation(self, incarnation: str) -> None:
        """Say who works here now.

        Raises:
            OSError: The disk refuses; what was recorded before stays.
        """
        replace_plain(self.path / "incarnation", incarnation.encode())

    def attempt(self, job_id: str, fence: int) -> AttemptFolder:
        """The folder of an attempt, there or not."""
        path = self.path / "jobs" / job_id / f"attempt-{fence}"
        boards = self._board_root()
        if boards is None:
            return AttemptFolder(path, path / "boards")
        return AttemptFolder(path, boards / f"{job_id}-{fence}")

    def jobs(self) -> list[str]:
        """The jobs of which attempts were launched here, oldest first."""
        return sorted(path.name for path in self.path.glob("jobs/job_*"))

    def unfinished(self) -> list[AttemptFolder]:
        """The attempts that were launched here and whose end is not recorded."""
        return [
            folder
            for job in sorted(self.path.glob("jobs/job_*"))
            for folder in self._attempts(job)
            if (folder.path / "launched.json").is_file() and folder.ended() is None
        ]

    def prune(self, deleted: Iterable[str]) -> list[Path]:
        """Remove the files of attempts that nobody asks for any more; answers which.

        Those of deleted jobs, and of every other job all but its newest ones, if they have ended.
        """
        gone = set(deleted)
        removed = []
        for job in sorted(self.path.glob("jobs/job_*")):
            kept = 0 if job.name in gone else ATTEMPTS_KEPT
            attempts = self._attempts(job)
            for attempt in attempts[: max(len(attempts) - kept, 0)]:
                if attempt.ended() is not None:
                    remove_what_can_be(attempt.path)
                    removed.append(attempt.path)
            with contextlib.suppress(OSError):  # something is in it yet
                job.rmdir()
        return removed

    def _attempts(self, job: Path) -> list[AttemptFolder]:
        """Those of a job, oldest first; what a rank put beside them is passed over."""
        numbers = (p.name.removeprefix("attempt-") for p in job.glob("attempt-*"))
        return [self.attempt(job.name, n) for n in sorted(int(n) for n in numbers if n.isdecimal())]

    def remove_boards(self) -> None:
        """Remove whatever boards an earlier agent of this folder left."""
        boards = self._board_root()
        if boards is not None:
            remove_what_can_be(boards)

    def remove_board_root(self) -> None:
        """Leave nothing on the tmpfs, unless boards are there that nobody has told about."""
        boards = self._board_root()
        if boards is not None:
            with contextlib.suppress(OSError):
                boards.rmdir()

    def _board_root(self) -> Path | None:
        root = self._shared_memory / f"meshloom-{self.mark}-{os.getuid()}"
        try:
            root.mkdir(mode=0o700, exist_ok=True)
            status = root.lstat()
        except OSError:
            return None
        # Anyone may make a folder there: one that others made or can enter is not ours to trust.
        private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
        return root if private and status.st_uid == os.getuid() else None
