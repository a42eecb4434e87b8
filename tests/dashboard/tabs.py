"""A controller that can be killed, and a browser that notes what goes over its wire."""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import httpx
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Error,
    Page,
    Request,
    Response,
    expect,
    sync_playwright,
)

from meshloom.client import RestClient as Client
from services.cli.errors import CliError
from services.local.children import die_with_parent
from services.local.settings import child_environment
from tests.e2e.conftest import free_port
from tests.waiting import until

_FLAGS: Final = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_TIMEOUT_MS: Final = 20_000
_BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


class Controller:
    """A controller process that can be killed and started again on the same port.

    Args:
        redis_url: The Redis on which it works.
        home: A folder for its output.
        token: The bearer token that it asks for, if any.
        settings: More of them, by the names of their variables.
    """

    def __init__(
        self, redis_url: str, home: Path, token: str | None = None, **settings: str
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.storage = home / "checkpoints"
        self.client = Client(self.url, token)
        self._log = home / "controller.log"
        variables = {
            "MESHLOOM_REDIS_URL": redis_url,
            "MESHLOOM_HOME": str(home),
            "MESHLOOM_HOST": "127.0.0.1",
            "MESHLOOM_PORT": str(port),
            "MESHLOOM_CHECKPOINT_ROOT": str(self.storage),
            **settings,
        } | ({"MESHLOOM_TOKEN": token} if token else {})
        inherited = child_environment()
        self._environment = {
            name: value for name, value in inherited.items() if not name.startswith("MESHLOOM_")
        } | variables
        self._process = self._spawn()

    def start(self) -> None:
        """Start it again after ``kill``."""
        self._process = self._spawn()

    def wait_until_ready(self) -> None:
        until(self._is_ready)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        self.wait_until_ready()
        return self

    def __exit__(self, *_error: object) -> None:
        self.client.__exit__(None, None, None)
        self.kill()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "services.controller"],
                env=self._environment,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,  # noqa: PLW1509  # nothing but one prctl call
            )

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        with contextlib.suppress(CliError, httpx.TransportError):
            return self.client.readiness().status == "ok"
        return False


@dataclass
class Visit:
    """A tab, and what went over its wire.

    Attributes:
        expected: Parts of complaints that are no fault. A page that asks by and by may complain late.
    """

    page: Page
    origin: str
    asked: list[str] = field(default_factory=list)
    answers: list[tuple[int, str]] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()
    _complaints: list[str] = field(default_factory=list)

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of the page, without those that are expected."""
        return [
            each for each in self._complaints if not any(part in each for part in self.expected)
        ]

    def listen(self) -> None:
        self.page.set_default_timeout(_TIMEOUT_MS)
        self.page.on("request", self._on_request)
        self.page.on("response", self._on_response)
        self.page.on("console", self._on_console)
        self.page.on("pageerror", self._on_error)

    def open(self, route: str) -> Page:
        self.page.goto(f"{self.origin}/{route}")
        return self.page

    def count(self, status: int, part: str) -> int:
        """How many answers had that status, of addresses that contain ``part``."""
        self.page.title()  # events arrive only while Playwright is asked for something
        return sum(status == known and part in url for known, url in self.answers)

    def _on_request(self, request: Request) -> None:
        self.asked.append(request.url)
        if not request.url.startswith(f"{self.origin}/"):
            self.foreign.append(request.url)

    def _on_response(self, response: Response) -> None:
        self.answers.append((response.status, response.url))

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self._complaints.append(message.text)

    def _on_error(self, error: Error) -> None:
        self._complaints.append(str(error))


@contextlib.contextmanager
def chromium(program: str) -> Iterator[Browser]:
    """A Chromium without a window."""
    expect.set_options(timeout=_TIMEOUT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(_FLAGS))
        yield browser
        browser.close()


def chromium_program() -> str | None:
    """Where it is installed."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)
