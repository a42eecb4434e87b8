"""Nodes by Slurm (https://slurm.schedmd.com): a batch job for each reservation, an agent on each node.

A batch job is named ``<owner>-<reservation id>``, and its comment says the pool and the nodes, so that a
controller that lost its records finds all of them. They are found by squeue's plain format: its JSON, as of
22.05, holds the batch jobs of all users whatever is asked for.
"""

import asyncio
import contextlib
import math
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Final

from services.contract.words.ids import NodeId
from services.contract.words.states import PoolKind
from services.controller.adapters.pools.pools_file import SlurmPoolConfig, limits_of
from services.controller.adapters.pools.slurm_script import batch_script
from services.controller.domain.scheduling.reservations import PoolLimits, Sighting
from services.controller.ports.pools import AgentProcess, PoolError, PoolRefusedError

_ANSWER_S: Final = 30.0
_DEAD_S: Final = 5.0
_OUTPUT_BYTES: Final = 16 * 2**20
_SAID_CHARACTERS: Final = 500
_HELD: Final = frozenset(
    {"PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUED", "RESIZING", "SIGNALING"}
)
_AS_ASKED: Final = frozenset({"COMPLETING", "COMPLETED", "CANCELLED"})
# What scancel says of a batch job that is at its end, and of one that Slurm has forgotten since the look.
_HAS_ENDED: Final = ("already completed", "already completing", "invalid job id")
# Without words it ends with the errno of these, ESLURM_INVALID_JOB_ID and ESLURM_ALREADY_DONE, of which an exit
# code keeps the low 8 bits.
_HAS_ENDED_CODES: Final = (2017 % 256, 2021 % 256)
_LATE_S: Final = 15.0
"""So long after its grace a batch job that was asked to end is cancelled."""
_LIMIT_NOTICE_S: Final = 10
"""Slurm sends signals up to so many seconds late, and knows no fractions."""
# Each digit can be read in one way only: of a run of them that no comma ends, an expression that can part it in
# many ways tries all of them.
_COMMENT: Final = re.compile(
    r"meshloom owner=(\S+) pool=(\S+) nodes=([0-9]{1,5}(?:-[0-9]{1,5})?(?:,[0-9]{1,5}(?:-[0-9]{1,5})?)*)"
)
_FIELDS: Final = 5
_MOST_NODES: Final = 10_000
"""As many as a pool may have."""
_SILENT: Final = (
    "unable to contact slurm controller",
    "timed out",
    "not responding",
    "zero bytes were transmitted",
    "temporarily un",
    "connection refused",
    "authentication",
    "munge",
    "establish a configuration source",
)
"""Of what sbatch says when Slurm does not answer, in lower case; all else is a refusal."""


@dataclass(frozen=True)
class _BatchJob:
    """One of ours.

    Attributes:
        number: Slurm's id of it.
        state: In Slurm's words.
        reason: Why it is pending, or has ended; in Slurm's words, empty: none.
        name: With the id of its reservation.
        pool: For which it was made.
        node_ids: For which it was made.
    """

    number: int
    state: str
    reason: str
    name: str
    pool: str
    node_ids: tuple[NodeId, ...]

    @property
    def is_held(self) -> bool:
        return self.state in _HELD

    @property
    def said(self) -> str:
        """Why it has no nodes; empty: it has them."""
        if self.state == "RUNNING":
            return ""
        if self.state == "PENDING":
            return self.reason
        reason = f", {self.reason}" if self.reason else ""
        return f"Slurm's job {self.number} is {self.state}{reason}"


class SlurmPool:
    """The port ``NodePool``.

    Args:
        config: Of the pool.
        owner: Stands in the names of our batch jobs.
        variables: Of the controller's environment; Slurm's commands get its paths, and what is for them.
    """

    def __init__(
        self, config: SlurmPoolConfig, owner: str = "meshloom", *, variables: Mapping[str, str]
    ) -> None:
        self._config = config
        self._owner = owner
        self._limits = limits_of(config, PoolKind.SLURM)
        self._environment = {
            name: value
            for name, value in variables.items()
            if name in {"PATH", "HOME", "USER", "LOGNAME", "TZ"}
            or name.startswith(("SLURM_CONF", "SLURM_JWT", "SBATCH_"))
        }
        self._asked_to_end: dict[int, float] = {}

    @property
    def limits(self) -> PoolLimits:
        """See ``NodePool.limits``."""
        return self._limits

    async def provision(self, reservation_id: str, agents: Mapping[NodeId, AgentProcess]) -> None:
        """See ``NodePool.provision``."""
        if await self._jobs(reservation_id):
            return
        script = batch_script(agents, self._config.grace_s)
        code, said, complaint = await self._run(
            "sbatch", *self._options(reservation_id, agents), stdin=script
        )
        if code:
            text = complaint or said or f"sbatch ended with {code}"
            silent = any(words in text.lower() for words in _SILENT)
            raise PoolError(text) if silent else PoolRefusedError(text)
        # A controller that does not know yet that it is deposed may have asked between the look and sbatch.
        # ``singleton`` lets only the first of both start.
        numbers = sorted(job.number for job in await self._jobs(reservation_id))
        await self._cancel(numbers[1:])

    async def release(self, reservation_id: str) -> None:
        """See ``NodePool.release``."""
        jobs = [job for job in await self._jobs(reservation_id) if job.is_held]
        now = time.monotonic()
        patience = self._config.grace_s + _LATE_S
        told = [
            job.number
            for job in jobs
            if job.state == "RUNNING"
            and now < self._asked_to_end.setdefault(job.number, now) + patience
        ]
        await self._cancel([job.number for job in jobs if job.number not in told])
        await self._cancel(told, "--batch", "--signal=USR1")

    async def sightings(self) -> Sequence[Sighting]:
        """See ``NodePool.sightings``."""
        jobs = await self._jobs()
        for number in self._asked_to_end.keys() - {job.number for job in jobs}:
            del self._asked_to_end[number]
        # Of several of one name the first that is held speaks for all, or else the first.
        ordered = sorted(jobs, key=lambda job: (job.is_held, -job.number))
        told = {job.name: job for job in ordered}
        return [
            Sighting(
                name.removeprefix(f"{self._owner}-"), job.node_ids, job.is_held, self._why(job)
            )
            for name, job in told.items()
        ]

    def _why(self, job: _BatchJob) -> str:
        """What it said, unless it ended as it was asked to."""
        is_asked = job.number in self._asked_to_end
        return "" if is_asked and job.state in _AS_ASKED else job.said

    async def close(self) -> None:
        """See ``NodePool.close``."""

    def _options(self, reservation_id: str, agents: Mapping[NodeId, AgentProcess]) -> Iterable[str]:
        """Of sbatch. Those of the file win over what stands before them, not over what names the job."""
        limits, count = self._limits, len(agents)
        notice_s = math.ceil(self._config.grace_s) + _LIMIT_NOTICE_S
        yield from ("--exclusive", "--mem=0", "--chdir=/", "--output=/dev/null")
        if limits.cpu_slots:
            yield f"--mincpus={limits.cpu_slots}"
        if limits.accelerators:
            yield f"--gres=gpu:{limits.accelerators}"
        yield f"--signal=B:USR1@{notice_s}"
        yield from self._config.options
        yield from ("--parsable", "--no-requeue", "--dependency=singleton", "--wait-all-nodes=1")
        yield from (f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1")
        # The controller's environment has its passwords in it; Slurm would hand on all of it.
        yield "--export=PATH,HOME"
        yield f"--job-name={self._owner}-{reservation_id}"
        nodes = _ranges(limits, agents)
        yield f"--comment=meshloom owner={self._owner} pool={limits.name} nodes={nodes}"

    async def _jobs(self, reservation_id: str | None = None) -> list[_BatchJob]:
        """The batch jobs of this pool that Slurm knows, of one reservation or of all."""
        named = () if reservation_id is None else (f"--name={self._owner}-{reservation_id}",)
        code, said, complaint = await self._run(
            "squeue", "--me", "--noheader", "--states=all", "-o", "%A|%T|%r|%j|%k", *named
        )
        if code:
            raise PoolError(complaint or f"squeue ended with {code}")
        jobs = (self._job(line) for line in said.splitlines())
        return [job for job in jobs if job is not None]

    def _job(self, line: str) -> _BatchJob | None:
        fields = line.split("|", 4)
        found = _COMMENT.fullmatch(fields[-1].strip())
        if found is None or found[1] != self._owner or found[2] != self._limits.name:
            return None
        # Who shares our account may name and describe a batch job as ours, and as nothing that we would make.
        if len(fields) != _FIELDS or not fields[0].isdecimal():
            return None
        number, state, reason, name, _ = fields
        if not name.startswith(f"{self._owner}-"):  # by which none could be released
            return None
        places = islice(_places(found[3]), _MOST_NODES)
        node_ids = tuple(f"{self._limits.name}-{place}" for place in places)
        return _BatchJob(
            int(number), state, "" if reason == "None" else reason, name, found[2], node_ids
        )

    async def _cancel(self, numbers: Sequence[int], *options: str) -> None:
        """Signal batch jobs; one that has ended meanwhile is nothing to complain of."""
        if not numbers:
            return
        code, _, complaint = await self._run("scancel", *options, *map(str, numbers))
        told = [words for words in complaint.lower().split("scancel: error:") if words.strip()]
        have_ended = all(any(end in words for end in _HAS_ENDED) for words in told)
        if code and not (have_ended if told else code in _HAS_ENDED_CODES):
            raise PoolError(complaint or f"scancel ended with {code}")

    async def _run(self, program: str, *words: str, stdin: str = "") -> tuple[int, str, str]:
        """Run one of Slurm's commands: its exit code, what it printed, and what it complained of.

        Raises:
            PoolError: It is not there, does not end in time, or prints too much.
        """
        path = program if self._config.bin is None else str(self._config.bin / program)
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                path,
                *words,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=self._environment,
                start_new_session=True,
            )
        except OSError as error:
            raise PoolError(f"{path}: {error.strerror}") from error
        out, err, fed = (
            asyncio.create_task(_bounded(process.stdout, program)),
            asyncio.create_task(_bounded(process.stderr, program)),
            asyncio.create_task(_feed(process.stdin, stdin)),
        )
        try:
            async with asyncio.timeout(_ANSWER_S):
                said, complaint, _ = await asyncio.gather(out, err, fed)
                code = await process.wait()
        except TimeoutError:
            raise PoolError(f"{program} did not end within {_ANSWER_S:g} s") from None
        finally:
            for task in (out, err, fed):
                task.cancel()
            await asyncio.wait((out, err, fed))  # a stream has one reader at a time
            if process.returncode is None:
                await _kill(process)
        return code, said, " ".join(complaint.split())[:_SAID_CHARACTERS]


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill a command and what it has started; what it still had to say is dropped.

    Unread output would keep its pipes open, and asyncio waits for a process until they are closed.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DEAD_S):
            for stream in (process.stdout, process.stderr):
                while stream is not None and await stream.read(2**16):
                    pass
            await process.wait()


async def _bounded(stream: asyncio.StreamReader | None, program: str) -> str:
    if stream is None:  # never: all three are pipes
        return ""
    read = bytearray()
    while part := await stream.read(2**16):
        read += part
        if len(read) > _OUTPUT_BYTES:
            raise PoolError(f"{program} printed more than {_OUTPUT_BYTES} bytes")
    return read.decode(errors="replace")


async def _feed(stream: asyncio.StreamWriter | None, text: str) -> None:
    if stream is None:  # never: all three are pipes
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(text.encode())
        await stream.drain()
    stream.close()


def _ranges(limits: PoolLimits, node_ids: Iterable[NodeId]) -> str:
    """The numbers of nodes, such as ``1-4,7``: a comment with thousands of names would be too long."""
    numbers = [int(node_id.removeprefix(f"{limits.name}-")) for node_id in node_ids]
    starts = [0, *(i for i, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1), len(numbers)]
    runs = [(numbers[first], numbers[after - 1]) for first, after in pairwise(starts)]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _places(ranges: str) -> Iterable[int]:
    for run in ranges.split(","):
        first, _, last = run.partition("-")
        yield from range(int(first), int(last or first) + 1)
