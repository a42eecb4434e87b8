"""The client of Meshloom's REST API, for programs and notebooks.

Example:
    >>> import meshloom
    >>> with meshloom.Client("http://127.0.0.1:8400") as client:  # doctest: +SKIP
    ...     job = client.jobs.submit({"model": ..., "data": ..., "train": {"steps": 100}})
    ...     job.wait().state
"""

import importlib
from typing import TYPE_CHECKING

from meshloom.client.errors import (
    ClientError,
    DownloadError,
    RefusedError,
    UnreachableError,
    WaitTimeoutError,
)

if TYPE_CHECKING:
    from meshloom.client.asynchronous.checkpoints import AsyncCheckpoint
    from meshloom.client.asynchronous.client import AsyncClient
    from meshloom.client.asynchronous.jobs import AsyncJob
    from meshloom.client.asynchronous.rest import AsyncRestClient
    from meshloom.client.metrics import Metrics
    from meshloom.client.synchronous.checkpoints import Checkpoint
    from meshloom.client.synchronous.client import Client
    from meshloom.client.synchronous.jobs import Job
    from meshloom.client.synchronous.rest import RestClient

__all__ = [
    "AsyncCheckpoint",
    "AsyncClient",
    "AsyncJob",
    "AsyncRestClient",
    "Checkpoint",
    "Client",
    "ClientError",
    "DownloadError",
    "Job",
    "Metrics",
    "RefusedError",
    "RestClient",
    "UnreachableError",
    "WaitTimeoutError",
]

_HOMES = {
    "AsyncCheckpoint": "asynchronous.checkpoints",
    "AsyncClient": "asynchronous.client",
    "AsyncJob": "asynchronous.jobs",
    "AsyncRestClient": "asynchronous.rest",
    "Checkpoint": "synchronous.checkpoints",
    "Client": "synchronous.client",
    "Job": "synchronous.jobs",
    "Metrics": "metrics",
    "RestClient": "synchronous.rest",
}


def __getattr__(name: str) -> object:
    # On first use: each kind of client is of no use to who has the other.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
