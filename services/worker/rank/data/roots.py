"""Paths in a spec: resolved below the roots that the node allows, or refused."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload


class PathOutsideRootsError(ValueError):
    """A path of the spec leads out of the folders that this node lets jobs read."""


@dataclass(frozen=True)
class DataRoots(Sequence[Path]):
    """Folders below which a job may read.

    Attributes:
        folders: They.
        private: Of the node: what lies in these is other jobs', unless a root lies in them itself.
    """

    folders: tuple[Path, ...] = ()
    private: tuple[Path, ...] = ()

    @overload
    def __getitem__(self, place: int) -> Path: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Path]: ...
    def __getitem__(self, place: int | slice) -> Path | Sequence[Path]:
        return self.folders[place]

    def __len__(self) -> int:
        return len(self.folders)


def inside(path: str | Path, roots: Sequence[Path]) -> Path:
    """The real file or folder that ``path`` means, links followed.

    A relative path is looked for below each root, and is the first one that is there.

    Raises:
        PathOutsideRootsError: It lies below none of them, or in a private folder.
    """
    real_roots = [root.resolve() for root in roots]
    private = [each.resolve() for each in roots.private] if isinstance(roots, DataRoots) else []
    found = [
        real
        for root in real_roots
        if (real := (root / path).resolve()).is_relative_to(root)
        and not any(_is_private(real, each, real_roots) for each in private)
    ]
    if not found:
        shown = ", ".join(map(str, roots)) or "none is set"
        raise PathOutsideRootsError(
            f"{path} is not below the folders that jobs may read here ({shown}), or it is in the node's "
            "home or storage; the operator of the node sets them as MESHLOOM_DATA_ROOTS"
        )
    return next((real for real in found if real.exists()), found[0])


def _is_private(real: Path, private: Path, real_roots: Sequence[Path]) -> bool:
    """Whether it lies in ``private``, and below no root that lies there itself: whichever root it was found by."""
    named = (root for root in real_roots if root.is_relative_to(private))
    return real.is_relative_to(private) and not any(map(real.is_relative_to, named))
