"""A real controller on a real Redis, and a browser that looks at it."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from playwright.sync_api import (
    Browser,
)
from redis import Redis

from services.contract.api.plan_views import PlanView
from services.local.embedded_redis import EmbeddedRedis
from tests.dashboard.scene import Scene, plan_in, set_scene
from tests.dashboard.scripted_agent import ScriptedAgent
from tests.dashboard.tabs import Controller, Visit, chromium, chromium_program
from tests.waiting import until

DASHBOARD: Final = Path(__file__).parents[2] / "services/controller/dashboard"
OFFLINE: Final = re.compile(
    r"\b(ENOTFOUND|ECONNREFUSED|ECONNRESET|EAI_AGAIN|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH)\b"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = chromium_program()
    if program is None:
        pytest.skip("no Chromium is installed: the dashboard cannot be looked at")
    with chromium(program) as browser:
        yield browser


@pytest.fixture(scope="module")
def controller(
    redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Controller]:
    redis_server.flush()
    with Controller(redis_server.url, tmp_path_factory.mktemp("controller")) as controller:
        yield controller


@pytest.fixture(scope="module")
def agent(controller: Controller, redis_server: EmbeddedRedis) -> Iterator[ScriptedAgent]:
    with Redis.from_url(redis_server.url, decode_responses=True) as redis:
        agent = ScriptedAgent(redis)
        agent.join()
        until(lambda: controller.client.nodes().items)
        yield agent


@pytest.fixture(scope="module")
def scene(controller: Controller, agent: ScriptedAgent) -> Scene:
    return set_scene(controller, agent)


@pytest.fixture(scope="module")
def plan(scene: Scene) -> PlanView:
    return plan_in(scene)


@pytest.fixture
def visit(browser: Browser, controller: Controller) -> Iterator[Callable[..., Visit]]:
    """Opens tabs; none may ask another origin for anything, nor complain unless it says so."""
    tabs: list[Visit] = []

    def open_tab(origin: str = controller.url, **options: Any) -> Visit:  # noqa: ANN401  # Playwright's
        tab = Visit(browser.new_page(**options), origin)
        tab.listen()
        tabs.append(tab)
        return tab

    yield open_tab
    for tab in tabs:
        tab.page.close()
        assert tab.foreign == []
        assert tab.complaints == []


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with what they need, outside of the repository."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("Node.js is not installed: the bundle cannot be rebuilt and compared")
    copy = tmp_path_factory.mktemp("rebuild") / "dashboard"
    shutil.copytree(DASHBOARD, copy, ignore=shutil.ignore_patterns("node_modules", "bundle"))
    done = subprocess.run(
        [npm, "ci", "--ignore-scripts", "--prefer-offline"],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode != 0 and (why := OFFLINE.search(done.stderr)):
        pytest.skip(f"npm cannot reach its registry ({why[0]}): the bundle cannot be rebuilt")
    assert done.returncode == 0, done.stderr
    return copy
