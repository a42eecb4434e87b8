"""Services of docker-compose.yml as containers of runc: what compose says of them, without an engine.

Root file systems are those of `tests.deploy.images`. All containers share one network namespace, in
which the services' names lead to loopback; what compose's networks keep apart is not tested here.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from tests.deploy.compose_file import ROOT, seconds, size, words
from tests.deploy.images import Image
from tests.waiting import until

_CLONE_NEWNET: Final = 0x40000000
_CPU_PERIOD_US: Final = 100_000
_SHM: Final = "64m"
_NO_CAPABILITIES: Final[tuple[str, ...]] = ()
# As Docker hides them.
_MASKED: Final = ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/acpi", "/sys/firmware")
_READ_ONLY: Final = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")


@dataclasses.dataclass(frozen=True)
class Container:
    """One that runs, or has ended.

    Attributes:
        name: Of runc's.
        log: What it wrote.
        process: Of ``runc run``, which ends with it.
    """

    service: Mapping[str, Any]
    image: Image
    name: str
    log: Path
    process: subprocess.Popen[bytes]

    def run(self, *command: str, user: str = "") -> subprocess.CompletedProcess[str]:
        """A command in it, as its user or another."""
        who = ["--user", user] if user else []
        return subprocess.run(
            ["runc", "exec", *who, self.name, *command],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=120,
        )

    @property
    def is_healthy(self) -> bool:
        """What its healthcheck says, of the service or else of the image."""
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        test = self.service.get("healthcheck", {}).get("test") or self._healthcheck
        command = ["sh", "-c", test[1]] if test[0] == "CMD-SHELL" else test[1:]
        return self.run(*command).returncode == 0

    @property
    def _healthcheck(self) -> list[str]:
        return list(self.image.config["Healthcheck"]["Test"])

    def processes(self) -> list[psutil.Process]:
        """Its init and all below it."""
        said = subprocess.run(
            ["runc", "ps", "--format", "json", self.name],
            capture_output=True,
            text=True,
            check=True,
        )
        found = []
        for pid in json.loads(said.stdout):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found

    def state(self) -> dict[str, Any]:
        """What runc knows of it."""
        said = subprocess.run(
            ["runc", "state", self.name], capture_output=True, text=True, check=True
        )
        return dict(json.loads(said.stdout))

    def stopped(self) -> None:
        """As `docker compose stop` does: SIGTERM, and SIGKILL after the time of grace."""
        if self.process.poll() is None:
            subprocess.run(["runc", "kill", self.name, "TERM"], check=False, capture_output=True)
            try:
                self.process.wait(seconds(self.service.get("stop_grace_period", "10s")))
            except subprocess.TimeoutExpired:
                subprocess.run(["runc", "kill", self.name, "KILL"], check=True)
                self.process.wait()


class Project:
    """What `docker compose up` keeps: volumes, a network, containers by service.

    Args:
        file: The rendered compose file.
        images: By the name of the service.
        folder: For volumes, bundles and logs.
        secrets_folder: In place of ``.secrets``.
    """

    def __init__(
        self,
        file: Mapping[str, Any],
        images: Mapping[str, Image],
        folder: Path,
        secrets_folder: Path,
    ) -> None:
        self.file = file
        self.images = images
        self.folder = folder
        self.secrets_folder = secrets_folder
        self.mark = f"compose-{secrets.token_hex(4)}"
        self.containers: dict[str, Container] = {}
        self._count = 0

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """One for all of them, in which this thread is, too."""
        subprocess.run(["ip", "netns", "add", self.mark], check=True)
        try:
            subprocess.run(["ip", "-n", self.mark, "link", "set", "lo", "up"], check=True)
            with _this_thread_in(self._netns):
                yield
        finally:
            subprocess.run(["ip", "netns", "del", self.mark], check=True)

    @property
    def _netns(self) -> Path:
        return Path("/run/netns") / self.mark

    def up(self, *names: str) -> None:
        """Start services in that order, each as soon as those that it depends on are so far."""
        for name in names:
            service = self.file["services"][name]
            for other, wanted in service.get("depends_on", {}).items():
                self._await(other, wanted["condition"])
            self.containers[name] = self.started(name)

    def _await(self, name: str, condition: str) -> None:
        container = self.containers[name]
        if condition == "service_healthy":
            until(lambda: container.is_healthy, every_s=0.5)
        elif condition != "service_started":
            assert condition == "service_completed_successfully"
            assert container.process.wait(120) == 0, container.log.read_text()

    def healthy(self, *names: str) -> None:
        """Wait until these say so."""
        for name in names:
            self._await(name, "service_healthy")

    def down(self, *, volumes: bool = False) -> None:
        """Stop all, the last one first, and with ``volumes`` remove what they kept."""
        for name in reversed(list(self.containers)):
            self.containers.pop(name).stopped()
        if volumes:
            shutil.rmtree(self.folder / "volumes")

    def once(self, name: str) -> str:
        """`docker compose run --rm`: what it wrote. Fails if it fails."""
        container = self.started(name)
        code = container.process.wait(300)
        said = container.log.read_text()
        assert code == 0, said
        return said

    def started(self, name: str) -> Container:
        """A new container of a service."""
        self._count += 1
        service, image = self.file["services"][name], self.images[name]
        bundle = self.folder / f"{self._count:02d}-{name}"
        bundle.mkdir(parents=True)
        (bundle / "config.json").write_text(json.dumps(self._config(name, service, image)))
        log = bundle / "log"
        full = f"{self.mark}-{self._count}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["runc", "run", "--bundle", str(bundle), full],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        container = Container(service, image, full, log, process)
        until(lambda: process.poll() is not None or _is_known(full))
        return container

    def _config(self, name: str, service: Mapping[str, Any], image: Image) -> dict[str, Any]:
        own = service.get("entrypoint")
        entry = words(own) if own is not None else list(image.config.get("Entrypoint") or ())
        command = service.get("command")
        if command is None and own is None:
            command = image.config.get("Cmd")
        arguments = [*entry, *words(command)]
        assert service["init"] is True
        user = _user(image.rootfs, str(service.get("user") or image.config.get("User") or "0"))
        variables = {
            "PATH": "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin",
            **dict(each.split("=", 1) for each in image.config.get("Env") or ()),
            **{key: str(text) for key, text in service.get("environment", {}).items()},
            "HOSTNAME": name,
        }
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        allowed = [f"CAP_{each}" for each in service.get("cap_add", _NO_CAPABILITIES)]
        # An ordinary user has none, and may gain no more than these.
        effective = allowed if user["uid"] == 0 else []
        namespace: dict[str, str] = {"type": "network"}
        if service.get("network_mode") != "none":
            namespace["path"] = str(self._netns)
        return {
            "ociVersion": "1.0.0",
            "hostname": name,
            "process": {
                "user": user,
                "args": ["/sbin/docker-init", "--", *arguments],
                "env": [f"{key}={text}" for key, text in variables.items()],
                "cwd": str(image.config.get("WorkingDir") or "/"),
                "noNewPrivileges": True,
                "capabilities": {
                    "bounding": allowed,
                    "effective": effective,
                    "permitted": effective,
                },
            },
            "root": {"path": str(image.rootfs), "readonly": bool(service["read_only"])},
            "mounts": self._mounts(service, image),
            "linux": {
                "cgroupsPath": f"/{self.mark}/{self._count}",
                "namespaces": [
                    *({"type": kind} for kind in ("pid", "ipc", "uts", "mount")),
                    namespace,
                ],
                "resources": {
                    "devices": [{"allow": False, "access": "rwm"}],
                    "memory": {"limit": size(str(service["mem_limit"]))},
                    "cpu": {
                        "quota": int(float(service["cpus"]) * _CPU_PERIOD_US),
                        "period": _CPU_PERIOD_US,
                    },
                    "pids": {"limit": int(service["pids_limit"])},
                },
                "maskedPaths": _MASKED,
                "readonlyPaths": _READ_ONLY,
            },
        }

    def _mounts(self, service: Mapping[str, Any], image: Image) -> list[dict[str, Any]]:
        shm = size(service.get("shm_size", _SHM))
        kernel = [
            _mount("/proc", "proc"),
            _mount("/dev", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
            _mount("/dev/pts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666"),
            _mount("/dev/shm", "tmpfs", "nosuid", "noexec", "nodev", "mode=1777", f"size={shm}"),  # noqa: S108 the container's
            _mount("/sys", "sysfs", "nosuid", "noexec", "nodev", "ro"),
            _mount("/sys/fs/cgroup", "cgroup", "nosuid", "noexec", "nodev", "ro"),
        ]
        kernel += [
            _mount(path, "tmpfs", "nosuid", "nodev", "noexec", "mode=1777")
            for path in service.get("tmpfs", ())
        ]
        hosts = self.folder / "hosts"
        names = " ".join(self.file["services"])
        hosts.write_text(f"127.0.0.1 localhost {names}\n")
        binds = [
            _bind(Path(shutil.which("tini-static") or ""), "/sbin/docker-init", "ro"),
            _bind(hosts, "/etc/hosts", "ro"),
        ]
        binds += [
            _bind(self.secrets_folder / name, f"/run/secrets/{name}", "ro")
            for name in service.get("secrets", ())
        ]
        volumes = []
        for volume in service.get("volumes", ()):
            source, target, *options = str(volume).split(":")
            path = ROOT / source if source.startswith("./") else self._volume(source, target, image)
            volumes.append(_bind(path, target, *options))
        # Outer folders first, so that a volume may lie in another.
        return kernel + binds + sorted(volumes, key=lambda each: str(each["destination"]))

    def _volume(self, name: str, target: str, image: Image) -> Path:
        """A named volume; a new one begins as the image has that folder, its owner included."""
        if name.startswith("/"):
            Path(name).mkdir(exist_ok=True)
            return Path(name)
        path = self.folder / "volumes" / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            original = image.rootfs / target.lstrip("/")
            if original.is_dir():
                subprocess.run(["cp", "--archive", original, path], check=True)
            else:
                path.mkdir()
        return path


def _mount(target: str, kind: str, *options: str) -> dict[str, Any]:
    return {"destination": target, "type": kind, "source": kind, "options": list(options)}


def _bind(source: Path, target: str, *options: str) -> dict[str, Any]:
    mode = ["rbind", "rprivate", *(options or ("rw",))]
    return {"destination": target, "type": "bind", "source": str(source), "options": mode}


def _user(rootfs: Path, wanted: str) -> dict[str, int]:
    """The numbers of ``name`` or ``uid:gid``, as the image knows them."""
    name, _, group = wanted.partition(":")
    for line in (rootfs / "etc/passwd").read_text().splitlines():
        fields = line.split(":")
        if name in (fields[0], fields[2]):
            return {"uid": int(fields[2]), "gid": int(group or fields[3])}
    return {"uid": int(name), "gid": int(group or 0)}


def _is_known(container: str) -> bool:
    done = subprocess.run(["runc", "state", container], capture_output=True, check=False)
    return done.returncode == 0


@contextlib.contextmanager
def _this_thread_in(netns: Path) -> Iterator[None]:
    """Sockets that this thread opens are of that network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if libc.setns(descriptor, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {path}")
        finally:
            os.close(descriptor)

    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        enter(netns)
        yield
    finally:
        if libc.setns(here, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "cannot leave the containers' network")
        os.close(here)


def environments(processes: Sequence[psutil.Process]) -> str:
    """What all of them were started with, as one text."""
    texts = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            texts.append(
                Path(f"/proc/{process.pid}/environ").read_bytes().decode("utf-8", "replace")
            )
            texts.append(" ".join(process.cmdline()))
    return "\n".join(texts)
