"""Paths in a spec: resolved below the roots that the node allows, or refused."""

from collections.abc import Sequence
from pathlib import Path


class PathOutsideRootsError(ValueError):
    """A path of the spec leads out of the folders that this node lets jobs read."""


def inside(path: str | Path, roots: Sequence[Path]) -> Path:
    """The real file or folder that ``path`` means, links followed.

    A relative path is looked for below each root, and is the first one that is there.

    Raises:
        PathOutsideRootsError: It lies below none of them.
    """
    real_roots = [root.resolve() for root in roots]
    found = [real for root in real_roots if (real := (root / path).resolve()).is_relative_to(root)]
    if not found:
        shown = ", ".join(map(str, roots)) or "none is set"
        raise PathOutsideRootsError(
            f"{path} is not below the folders that jobs may read here ({shown}); the operator of "
            "the node sets them as MESHLOOM_DATA_ROOTS"
        )
    return next((real for real in found if real.exists()), found[0])
