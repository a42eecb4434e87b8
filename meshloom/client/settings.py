"""Where the controller is, read from the environment."""

import os
from dataclasses import dataclass, field
from typing import Final

_DEFAULT_PORT: Final = "8400"


@dataclass(frozen=True)
class ClientSettings:
    """``MESHLOOM_URL`` (else this host and ``MESHLOOM_PORT``, 8400) and ``MESHLOOM_TOKEN``."""

    base_url: str
    token: str | None = field(default=None, repr=False)


def client_settings() -> ClientSettings:
    """The settings as the environment has them now."""
    port = os.environ.get("MESHLOOM_PORT", _DEFAULT_PORT)
    url = os.environ.get("MESHLOOM_URL") or f"http://127.0.0.1:{port}"
    return ClientSettings(url.rstrip("/"), os.environ.get("MESHLOOM_TOKEN") or None)
