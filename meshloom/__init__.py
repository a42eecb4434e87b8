"""What users import: training code to run under Meshloom, programs to speak to a controller.

``DataSource`` and ``Trainable`` are base classes for data and models; ``session`` is for scripts
that bring their own loop; ``integrations`` connects trainers of other libraries. ``Client`` and
``AsyncClient`` submit and watch jobs from any program (``pip install 'meshloom[client]'``). Nothing
else of Meshloom is an interface for user code. Under plain ``torchrun`` or ``python`` training code
works, too: reports are then dropped.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshloom.client import AsyncClient as AsyncClient
    from meshloom.client import Client as Client
    from meshloom.data import DataSource as DataSource
    from meshloom.data import IterableSource as IterableSource
    from meshloom.data import MapSource as MapSource
    from meshloom.data import Mixture as Mixture
    from meshloom.trainable import Trainable as Trainable

__all__ = [
    "AsyncClient",
    "Client",
    "DataSource",
    "IterableSource",
    "MapSource",
    "Mixture",
    "Trainable",
]

_HOMES = {
    "AsyncClient": "meshloom.client",
    "Client": "meshloom.client",
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
