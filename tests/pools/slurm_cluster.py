"""A real Slurm on one machine: munged, slurmctld, and a slurmd for each node, in a folder, on own ports.

Debian's slurmd is built for several on one machine (``-N`` names the node). Everything dies with the test,
batch jobs among it.
"""

import contextlib
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Self

import psutil

from tests.e2e.conftest import free_port
from tests.parts import Part, gone
from tests.pools.machines import Machines
from tests.waiting import until

_PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "srun", "sinfo")
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MARK: Final = "MARK_OF_SLURM_CLUSTER"


def why_not_here() -> str | None:
    """Why no Slurm can run here; None: one can."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    return f"not installed: {', '.join(missing)} (slurm-wlm, munge)" if missing else None


class SlurmCluster(Machines):
    """All daemons; use it as a context manager in the main thread, with which they die.

    Args:
        nodes: How many, each of one CPU that batch jobs can have.

    Attributes:
        folder: Of all files. Short and readable for all: munge demands both of its socket's path.
        mark: The value of ``marks``.
        variables: With which Slurm's commands find this cluster.
        controller: slurmctld.
        nodes: The slurmds by node.
    """

    def __init__(self, nodes: int) -> None:
        self.mark = secrets.token_hex(8)
        self._names = [f"n{number}" for number in range(1, nodes + 1)]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
            self.folder.chmod(0o755)
            self._config = self.folder / "slurm.conf"
            self.variables: Mapping[str, str] = {"PATH": _PATH, "SLURM_CONF": str(self._config)}
            stack.callback(self.kill_all)
            munge = self._start_munge(stack)
            self._config.write_text(self._configuration(munge))
            self.controller = self._part("slurmctld", "slurmctld", "-D")
            self._start(self.controller, stack)
            self.nodes = {
                name: self._part(name, "slurmd", "-D", "-N", name) for name in self._names
            }
            for node in self.nodes.values():
                self._start(node, stack)
            until(lambda: self.idle_nodes() == set(self._names))
            self._parts = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    @property
    def marks(self) -> Mapping[str, str]:
        """What marks a process as one of this cluster's."""
        return {_MARK: self.mark}

    def say(self, *command: str) -> str:
        """What one of Slurm's commands prints; nothing if it fails."""
        done = subprocess.run(
            command, env=dict(self.variables), capture_output=True, text=True, check=False
        )
        return done.stdout if done.returncode == 0 else ""

    def idle_nodes(self) -> set[str]:
        """Nodes that a batch job could have now."""
        lines = (line.split() for line in self.say("sinfo", "-hNo", "%N %T").splitlines())
        return {name for name, state in lines if state == "idle"}

    def batch_jobs(self, name: str) -> list[str]:
        """The states of all batch jobs of this name."""
        return self.say("squeue", "-h", "--states=all", f"--name={name}", "-o", "%T").split()

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """See ``Machines.processes``: of batch jobs slurmstepd and all below it.

        Of all nodes, also those with ``marks``, which may have escaped.
        """
        spool = f"{self.folder}/spool/{node or ''}"
        found: set[psutil.Process] = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.name() == "slurmstepd":
                    # Its title lies where its environment was; its socket is what tells whose it is.
                    sockets = process.net_connections("unix")
                    if any(str(each.laddr).startswith(spool) for each in sockets):
                        found.update((process, *process.children(recursive=True)))
                elif node is None and process.environ().get(_MARK) == self.mark:
                    found.add(process)
        return [process for process in found if not gone([process])]

    @contextlib.contextmanager
    def without_controller(self) -> Iterator[None]:
        """slurmctld stopped until the block ends; killed, it would forget what it has not written yet."""
        self.controller.stop()
        try:
            yield
        finally:
            self.controller.start()
            until(lambda: bool(self.idle_nodes()))

    def _start(self, part: Part, stack: contextlib.ExitStack) -> None:
        stack.callback(part.stop)
        part.start()

    def _part(self, name: str, program: str, *words: str | Path) -> Part:
        path = shutil.which(program, path=_PATH)
        assert path is not None
        return Part(name, [path, *words], self.variables, self.folder / f"{name}.log")

    def _start_munge(self, stack: contextlib.ExitStack) -> Path:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o600)
        sock = self.folder / "munge.socket"
        files = [
            f"--{kind}-file={self.folder}/munge.{kind}" for kind in ("key", "pid", "seed", "log")
        ]
        words = ("--foreground", "--force", "--num-threads=2", f"--socket={sock}", *files)
        self._start(self._part("munged", "munged", *words), stack)
        until(sock.exists)
        return sock

    def _configuration(self, munge: Path) -> str:
        host = socket.gethostname().split(".")[0]
        user = pwd.getpwuid(os.geteuid()).pw_name
        for name in self._names:
            (self.folder / "spool" / name).mkdir(parents=True)
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1 State=UNKNOWN"
            for name in self._names
        )
        return f"""
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={munge}
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool/%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
SlurmdTimeout=5
MessageTimeout=5
KillWait=1
CompleteWait=0
MinJobAge=3600
ReturnToService=2
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
