"""``python -m tests.pools.kube_binaries FOLDER``: Kubernetes's control plane, built once into a folder.

Debian has the source of Kubernetes 1.20, but no packages of its servers; of etcd it has one. All is fetched from the
mirror that apt has, and nothing is installed: packages are unpacked below the folder, and Go builds there.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.request import urlopen

from services.local.settings import child_environment

RELEASE: Final = "1.20.2"
SERVERS: Final = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
_SOURCE: Final = "pool/main/k/kubernetes/kubernetes_1.20.5+really1.20.2.orig.tar.gz"
_SHA256: Final = "b83c0780efb182d928dc63d46488a847f161f04e40a94b96bf5247dd671ecdfc"
_GO: Final = ("golang-1.19-go", "golang-1.19-src")
_ETCD: Final = "etcd-server"
_PROGRAMS: Final = ("apt-get", "apt-cache", "dpkg-deb", "nice", "openssl", "tar")
_OPENAPI: Final = "k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen"
_TAG: Final = "+k8s:openapi-gen="


def why_not_here() -> str | None:
    """Why it cannot be built here; None: it can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"PATH lacks {', '.join(missing)}"
    unknown = [name for name in (*_GO, _ETCD) if not _said("apt-cache", "madison", name)]
    return f"not in apt's lists: {', '.join(unknown)} (Debian 12)" if unknown else None


def built(folder: Path) -> Path:
    """The folder with ``etcd`` and the servers, which are built if they are not there.

    Raises:
        subprocess.CalledProcessError: A step failed.
        ValueError: The source is another one.
    """
    programs = folder / "bin"
    if programs.is_dir():
        return programs
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    made = work / "bin"
    made.mkdir(parents=True)
    _unpack(work)
    shutil.copy(work / "usr/bin/etcd", made)
    source = work / "src/k8s.io/kubernetes"
    source.mkdir(parents=True)
    _fetch(work / "source.tar.gz")
    _run(["tar", "xzf", work / "source.tar.gz", "--strip-components=1"], source)
    environment = {
        **child_environment(),
        "PATH": f"{work}/usr/lib/go-1.19/bin:{child_environment()['PATH']}",
        "GOROOT": f"{work}/usr/lib/go-1.19",
        "GOPATH": str(work),
        "GO111MODULE": "off",  # vendored packages are found as in the release's own build
        "GOCACHE": f"{work}/cache",
        "CGO_ENABLED": "0",
        "HOME": str(work),
    }
    _generate_openapi(source, environment)
    version = "k8s.io/kubernetes/vendor/k8s.io/component-base/version"
    release = f"-X {version}.gitVersion=v{RELEASE} -X {version}.gitMajor=1 -X {version}.gitMinor=20"
    build = ["nice", "go", "build", "-p", "1", "-tags", "providerless"]
    for server in SERVERS:
        target = ["-o", str(made / server), f"k8s.io/kubernetes/cmd/{server}"]
        _run([*build, "-ldflags", f"-s -w {release}", *target], source, environment)
    made.rename(programs)
    shutil.rmtree(work)
    return programs


def _unpack(folder: Path) -> None:
    packages = folder / "packages"
    packages.mkdir()
    _run(["apt-get", "download", "-qq", *_GO, _ETCD], packages)
    for package in packages.iterdir():
        _run(["dpkg-deb", "-x", package, folder], folder)


def _fetch(file: Path) -> None:
    """The source, from the first of apt's mirrors."""
    wanted = ("--format", "$(REPO_URI)", "Created-By: Packages", "Component: main")
    mirrors = _said("apt-get", "indextargets", *wanted, "Codename: bookworm").split()
    with urlopen(f"{mirrors[0]}{_SOURCE.replace('+', '%2b')}") as answer, file.open("wb") as target:  # noqa: S310 a mirror of apt's
        shutil.copyfileobj(answer, target)
    with file.open("rb") as made:
        found = hashlib.file_digest(made, "sha256").hexdigest()
    if found != _SHA256:
        raise ValueError(f"{file.name} has SHA-256 {found}, not {_SHA256}")


def _generate_openapi(source: Path, environment: Mapping[str, str]) -> None:
    """What the release's source leaves to its build: the schemas that the API server serves."""
    folders = {
        file.parent.relative_to(source)
        for top in ("pkg", "cmd", "vendor/k8s.io")
        for file in _go_files(source / top)
        if _TAG in file.read_text()
    }
    left_out = ("code-generator", "sample-apiserver")
    inputs = sorted(
        f"k8s.io/kubernetes/{folder}"
        for folder in folders
        if not any(part in folder.parts for part in left_out)
    )
    run = ["nice", "go", "run", "-p", "1", _OPENAPI, "-i", ",".join(inputs)]
    made = ["-p", "k8s.io/kubernetes/pkg/generated/openapi", "-O", "zz_generated.openapi"]
    notes = ["-h", "vendor/k8s.io/code-generator/hack/boilerplate.go.txt", "-r", "violations"]
    _run([*run, *made, *notes, "-o", f"{environment['GOPATH']}/src"], source, environment)


def _go_files(folder: Path) -> list[Path]:
    """Below it, links to other parts of the source followed."""
    return [
        Path(root) / name
        for root, _, names in os.walk(folder, followlinks=True)
        for name in names
        if name.endswith(".go")
    ]


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _run(
    command: Sequence[str | Path], folder: Path, environment: Mapping[str, str] | None = None
) -> None:
    subprocess.run(command, cwd=folder, env=environment, check=True)


def main() -> None:
    """Build it, unless it is there or cannot be built here."""
    if (reason := why_not_here()) is not None:
        sys.stdout.write(f"{reason}\n")
        return
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.write(f"{built(folder)}\n")


if __name__ == "__main__":
    main()
