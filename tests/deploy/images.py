"""Images built from deploy/*.Dockerfile without an engine: buildah, on a Debian that mmdebstrap makes.

No image registry is asked: ``ARG BASE`` is that Debian, and a second one stands in for the images of
Redis and Prometheus. Wheels come by pip, as this machine has it configured. All of it is kept in one
folder outside the project, and an image is built again only when what it is made of has changed.
"""

import functools
import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.deploy.compose_file import ROOT

PROGRAMS: Final = ("buildah", "mmdebstrap", "runc", "tini-static", "ip", "capsh")
_SUITE: Final = "bookworm"
_OTHERS: Final = "redis-server,redis-tools,prometheus"
_SOURCES: Final = ("fsdp_core", "meshloom", "services")
_TORCH: Final = "torch==2.13.0"


@dataclass(frozen=True)
class Image:
    """A root file system that can be written, and what the Dockerfile says of it.

    Attributes:
        rootfs: Where it is mounted.
        config: Docker's: ``Env``, ``Entrypoint``, ``User``, ``Healthcheck`` and so on.
    """

    rootfs: Path
    config: dict[str, Any]


@dataclass(frozen=True)
class Workshop:
    """Where images are built and kept.

    Attributes:
        folder: On a file system with 10 GB to spare, which is no overlay.
    """

    folder: Path

    def meshloom(self, name: str) -> Image:
        """The image of ``deploy/<name>.Dockerfile``."""
        tag = f"localhost/meshloom-{name}:{self._digest(name)}"
        if not self._has(tag):
            base = self._imported("base", self._debian("base", "python3,python3-venv"))
            self._buildah(
                *("build", "--isolation", "chroot", "--format", "docker", "--layers"),
                *("--pull=false", "--network", "host", "--volume", f"{self._wheels()}:/wheels:ro"),
                *("--build-arg", f"BASE={base}", "--build-arg", f"TORCH={_TORCH}"),
                *("--build-arg", "PIP_OPTIONS=--no-index --find-links /wheels"),
                *("--file", str(ROOT / "deploy" / f"{name}.Dockerfile"), "--tag", tag, str(ROOT)),
            )
        return self._mounted(tag)

    def others(self) -> dict[str, Image]:
        """A Debian with Redis and Prometheus, in place of the images of those services."""
        tag = self._imported("others", self._debian("others", _OTHERS))
        image = self._mounted(tag)
        for folder, user in (("data", "redis"), ("prometheus", "nobody")):
            (image.rootfs / folder).mkdir(exist_ok=True)
            self._in(image, "chown", user, f"/{folder}")
        # Redis's image has an entry point, too, but one that runs what it is given.
        return {"redis": image, "prometheus": Image(image.rootfs, {"Entrypoint": ["prometheus"]})}

    def removed(self) -> None:
        """Remove containers and mounts; images stay."""
        self._buildah("rm", "--all")

    def _debian(self, name: str, packages: str) -> Path:
        path = self.folder / f"{name}-{_SUITE}.tar"
        if not path.exists():
            draft = path.with_suffix(".draft.tar")
            _run("mmdebstrap", "--variant=minbase", f"--include={packages}", _SUITE, str(draft))
            draft.rename(path)
        return path

    def _imported(self, name: str, tar: Path) -> str:
        tag = f"localhost/meshloom-test-{name}:{_SUITE}"
        if not self._has(tag):
            container = self._buildah("from", "scratch")
            self._buildah("add", "--quiet", container, str(tar), "/")
            self._buildah("commit", "--quiet", container, tag)
            self._buildah("rm", container)
        return tag

    def _wheels(self) -> Path:
        """All that both images install; async-timeout is for Pythons older than 3.11.3, as Debian's is."""
        folder = (
            self.folder / f"wheels-{_digest_of(ROOT / 'constraints.txt', ROOT / 'pyproject.toml')}"
        )
        if not folder.exists():
            draft = folder.with_name(f"{folder.name}.draft")
            shutil.rmtree(draft, ignore_errors=True)
            _run(
                *(sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(draft)),
                *("--constraint", str(ROOT / "constraints.txt")),
                *(_TORCH, "numpy", "hatchling", "async-timeout", f"{ROOT}[controller,agent,rank]"),
            )
            for older in self.folder.glob("wheels-*"):
                if older != draft:
                    shutil.rmtree(older)
            draft.rename(folder)
        return folder

    def _digest(self, name: str) -> str:
        paths = [ROOT / "deploy" / f"{name}.Dockerfile", ROOT / ".dockerignore"]
        paths += [ROOT / "pyproject.toml", ROOT / "constraints.txt"]
        for source in _SOURCES:
            paths += sorted(p for p in (ROOT / source).rglob("*") if _is_built_in(p))
        return _digest_of(*paths)

    def _has(self, tag: str) -> bool:
        return bool(self._buildah("images", "--quiet", "--filter", f"reference={tag}"))

    def _mounted(self, tag: str) -> Image:
        container = self._buildah("from", "--pull-never", tag)
        rootfs = Path(self._buildah("mount", container))
        known = json.loads(self._buildah("inspect", "--type", "image", tag))
        return Image(rootfs, dict(known["Docker"]["config"]))

    def _in(self, image: Image, *command: str) -> None:
        _run("chroot", str(image.rootfs), *command)

    def _buildah(self, *arguments: str) -> str:
        return _run(*self._command, *arguments).strip()

    @functools.cached_property
    def _command(self) -> tuple[str, ...]:
        folders = ("--root", self.folder / "images", "--runroot", self.folder / "run")
        return ("buildah", *map(str, folders), "--storage-driver", "overlay")


def _is_built_in(path: Path) -> bool:
    left_out = {"node_modules", "src", "typegen", "__pycache__"}
    return path.is_file() and not left_out & set(path.relative_to(ROOT).parts)


def _digest_of(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(ROOT)}\0{path.stat().st_mode}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout
