"""How tests, kubelets and controllers speak to an API server, be it the stand-in or Kubernetes's own."""

import contextlib
import json
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.request import Request, urlopen

NAMESPACE: Final = "agents"
ADMIN_TOKEN: Final = "admin"  # noqa: S105 of a test
_ANSWER_S: Final = 10.0

Thing = dict[str, Any]


def now_text(later_s: float = 0) -> str:
    """The present, as objects have it."""
    return (datetime.now(UTC) + timedelta(seconds=later_s)).strftime("%Y-%m-%dT%H:%M:%SZ")


class Server:
    """The API server as one of its clients sees it.

    Args:
        address: Its URL.
        ca: The file of its authority; None: it has no TLS.
        token: The client's; by default of one who may do everything.
    """

    def __init__(self, address: str, ca: Path | None = None, token: str = ADMIN_TOKEN) -> None:
        self._address = address
        self._token = token
        self._tls = None if ca is None else ssl.create_default_context(cafile=str(ca))

    def ask(self, method: str, path: str, body: Thing | None = None) -> Thing:
        """Send a request; a patch is a merge patch.

        Raises:
            HTTPError: The answer is not 2xx.
            OSError: There is none.
        """
        said: Thing = json.loads(self._sent(method, path, body))
        return said

    def is_ready(self) -> bool:
        """Whether it has all that it needs to judge requests; the stand-in has it from the start."""
        with contextlib.suppress(OSError):
            return self._sent("GET", "readyz", None) == b"ok"
        return False

    def _sent(self, method: str, path: str, body: Thing | None) -> bytes:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        request = Request(  # noqa: S310 our own server
            f"{self._address}/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": kind},
        )
        with urlopen(request, timeout=_ANSWER_S, context=self._tls) as answer:  # noqa: S310 our own server
            said: bytes = answer.read()
            return said
