"""What training code imports to run under Meshloom.

``DataSource`` and ``Trainable`` are base classes for data and models; ``session`` is for scripts
that bring their own loop; ``integrations`` connects trainers of other libraries. Nothing else of
Meshloom is an interface for user code. Under plain ``torchrun`` or ``python`` everything here works
too: reports are then dropped.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshloom.data import DataSource as DataSource
    from meshloom.data import IterableSource as IterableSource
    from meshloom.data import MapSource as MapSource
    from meshloom.data import Mixture as Mixture
    from meshloom.trainable import Trainable as Trainable

__all__ = ["DataSource", "IterableSource", "MapSource", "Mixture", "Trainable"]

_HOMES = {
    "DataSource": "meshloom.data",
    "IterableSource": "meshloom.data",
    "MapSource": "meshloom.data",
    "Mixture": "meshloom.data",
    "Trainable": "meshloom.trainable",
}


def __getattr__(name: str) -> object:
    # Imported when first asked for: a script that only reports must not wait for what it does not use.
    if name == "session":
        return importlib.import_module("meshloom.session")
    if name not in _HOMES:
        raise AttributeError(f"module 'meshloom' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
