"""What the images hold of others, and under which licences: ``python -m tests.deploy.licences``.

It writes docs/licences.md, and an SBOM (CycloneDX 1.6, JSON) of each image into ``sbom/``. Python packages
come from this environment by cyclonedx-bom, those of the dashboard from its lock file.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distribution
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.compose_file import ROOT

PAGE: Final = ROOT / "docs/licences.md"
_FOLDER: Final = ROOT / "sbom"
_LOCK: Final = ROOT / "services/controller/dashboard/package-lock.json"
IMAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "controller": ("controller",),
    "worker": ("agent", "rank"),
}
# A licence that is not here needs a look by a person: whether the images may be given to others.
ALLOWED: Final = frozenset(
    {
        *("0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause"),
        *("BSL-1.0", "CC0-1.0", "ISC", "MIT", "MPL-2.0", "PSF-2.0", "Zlib"),
    }
)
# Classifiers that stand in place of an SPDX id, or beside one.
_SPDX: Final[Mapping[str, str]] = {
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: BSD License": "BSD-3-Clause",
    "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}
# The tool does not recognise the text "3-Clause BSD License".
_BY_HAND: Final[Mapping[str, str]] = {"protobuf": "BSD-3-Clause"}
# A CUDA build of torch brings them; a CPU build, such as the tests', does not.
_OF_CUDA: Final = re.compile(r"nvidia-|cuda-|triton$")


@dataclass(frozen=True, order=True)
class Package:
    """One package of others.

    Attributes:
        where: The images that hold it.
        licence: An SPDX expression.
    """

    name: str
    version: str
    licence: str
    where: str


def closure(extras: Iterable[str]) -> frozenset[str]:
    """All packages that ``meshloom[extras]`` installs here, by canonical name, without itself."""
    found: set[str] = set()
    waiting = [("meshloom", frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        for text in distribution(name).requires or ():
            requirement = Requirement(text)
            marker = requirement.marker
            contexts = [{"extra": extra} for extra in ("", *wanted)]
            if marker is None or any(map(marker.evaluate, contexts)):
                needed = canonicalize_name(requirement.name)
                waiting.append((needed, frozenset(requirement.extras)))
                found.add(needed)
    return frozenset(name for name in found - {"meshloom"} if not _OF_CUDA.match(name))


@cache
def environment() -> dict[str, Any]:
    """This environment's SBOM."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-format", "JSON"]
    done = subprocess.run(
        [*command, "--output-reproducible", sys.executable],
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout))


def sbom(image: str) -> dict[str, Any]:
    """The part of it that an image holds."""
    wanted = closure(IMAGES[image])
    whole = environment()
    components = [c for c in whole["components"] if canonicalize_name(c["name"]) in wanted]
    kept = {component["bom-ref"] for component in components}
    dependencies = [
        {"ref": each["ref"], "dependsOn": sorted(kept.intersection(each.get("dependsOn", ())))}
        for each in whole["dependencies"]
        if each["ref"] in kept
    ]
    return {
        **{key: whole[key] for key in ("$schema", "bomFormat", "specVersion", "version")},
        "metadata": {"component": {"type": "container", "name": f"meshloom-{image}"}},
        "components": components,
        "dependencies": dependencies,
    }


def python_packages() -> Iterator[Package]:
    """Those of both images."""
    where = {image: closure(extras) for image, extras in IMAGES.items()}
    for component in environment()["components"]:
        name = canonicalize_name(component["name"])
        images = [image for image, names in where.items() if name in names]
        if images:
            licence = _licence(component)
            version = component["version"].partition("+")[0]  # which build of torch it is
            yield Package(name, version, licence, ", ".join(images))


def dashboard_packages() -> Iterator[Package]:
    """Those that the dashboard's bundle is made of."""
    for path, each in json.loads(_LOCK.read_text())["packages"].items():
        if path and not each.get("dev"):
            name = path.rpartition("node_modules/")[2]
            yield Package(name, each["version"], each.get("license", "unknown"), "dashboard")


def refused(licence: str) -> set[str]:
    """What of an SPDX expression is not allowed; nothing if one of its alternatives is."""
    alternatives = [
        {word.strip(" ()") for word in alternative.split(" AND ")}
        for alternative in licence.split(" OR ")
    ]
    return min((words - ALLOWED for words in alternatives), key=len)


def page() -> str:
    """docs/licences.md."""
    lines = [
        "# Licences of what the images hold",
        "",
        "<!-- Made by `python -m tests.deploy.licences` from the installed packages and the dashboard's lock file. -->",
        "",
        "Packages of others in the images of controller and worker, and in the dashboard's bundle, which the controller",
        "serves. `make sbom` writes the same as CycloneDX files into `sbom`. A CUDA build of torch also brings triton (MIT)",
        "and NVIDIA's libraries, which have licences of NVIDIA's own. The base image (`ARG BASE`) has its own list.",
        "",
        "| package | version | licence | in |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {each.name} | {each.version} | {each.licence} | {each.where} |"
        for each in (*sorted(python_packages()), *sorted(dashboard_packages()))
    ]
    return "\n".join([*lines, ""])


def _licence(component: Mapping[str, Any]) -> str:
    said = []
    for each in component.get("licenses", ()):
        licence = each.get("license", {})
        said.append(each.get("expression") or licence.get("id") or licence.get("name") or "")
    names = sorted({_SPDX.get(name, name) for name in said if name})
    return " AND ".join(names) or _BY_HAND.get(component["name"], "unknown")


def main() -> None:
    """Write the page and the SBOMs."""
    PAGE.write_text(page())
    _FOLDER.mkdir(exist_ok=True)
    for image in IMAGES:
        (_FOLDER / f"{image}.cdx.json").write_text(json.dumps(sbom(image), indent=1) + "\n")


if __name__ == "__main__":
    main()
