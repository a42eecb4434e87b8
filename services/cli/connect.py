"""The connection that every command opens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from meshloom.client import RestClient as Client
from meshloom.client.settings import ClientSettings

PATIENCE_S: Final = 1.0
WATCHING_PATIENCE_S: Final = 120.0


@contextmanager
def connect(patience_s: float = PATIENCE_S) -> Iterator[Client]:
    """A client of the controller that the settings name, until the block ends."""
    settings = ClientSettings.from_environment()
    with Client(settings.base_url, settings.token, patience_s=patience_s) as client:
        yield client
