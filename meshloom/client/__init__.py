"""The client of Meshloom's REST API, for programs and notebooks.

Example:
    >>> import meshloom
    >>> with meshloom.Client("http://127.0.0.1:8400") as client:  # doctest: +SKIP
    ...     job = client.jobs.submit({"model": ..., "data": ..., "train": {"steps": 100}})
    ...     job.wait().state
"""

from meshloom.client.asynchronous.checkpoints import AsyncCheckpoint
from meshloom.client.asynchronous.client import AsyncClient
from meshloom.client.asynchronous.jobs import AsyncJob
from meshloom.client.asynchronous.rest import AsyncRestClient
from meshloom.client.errors import (
    ClientError,
    DownloadError,
    RefusedError,
    UnreachableError,
    WaitTimeoutError,
)
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
