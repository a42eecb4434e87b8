"""Takes the pictures of the dashboard in ``docs/pictures``: ``python -m tests.dashboard.pictures``.

A real controller on a real Redis answers; the scripted agent tells what ranks would. Needs Chromium.
"""

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Final

from playwright.sync_api import expect
from redis import Redis

from services.local.embedded_redis import EmbeddedRedis
from tests.dashboard.conftest import Controller, Visit, chromium, chromium_program
from tests.dashboard.scene import Scene, plan_in, set_scene
from tests.dashboard.scripted_agent import ScriptedAgent
from tests.waiting import until

_FOLDER: Final = Path(__file__).parents[2] / "docs/pictures"
WIDTH, HEIGHT = 1280, 800


def routes(scene: Scene, plan_id: str) -> dict[str, tuple[str, str]]:
    """Of each page its name, its address, and what is there once it is loaded."""
    job = scene.running.id
    return {
        "jobs": ("#/jobs", ".sparkline polyline"),
        "job": (f"#/jobs/{job}", ".rank-grid canvas"),
        "failed": (f"#/jobs/{scene.failed.id}", ".place"),
        "compare": (f"#/compare?jobs={job},{scene.failed.id}", ".plot canvas"),
        "queue": ("#/queue", "tr[data-job]"),
        "plan": (f"#/plans/{plan_id}", ".stack i"),
        "plans": ("#/plans", "tr[data-plan]"),
        "submit": (f"#/submit?from={job}", ".cm-line"),
        "checkpoints": (f"#/checkpoints?job={job}", "tr[data-checkpoint]"),
        "logs": (f"#/jobs/{job}/logs", ".log .line"),
        "nodes": ("#/nodes", "[data-node]"),
        "access": ("#/access", ".audit tr"),
        "login": ("#/login", "form.login"),
    }


def main() -> None:
    """Take them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=_FOLDER)
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    parser.add_argument("--width", type=int, default=WIDTH)
    chosen = parser.parse_args()
    program = chromium_program()
    if program is None:
        sys.exit("no Chromium is installed: the dashboard cannot be looked at")
    chosen.output.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(EmbeddedRedis.start(home))
        controller = stack.enter_context(Controller(server.url, home))
        redis = stack.enter_context(Redis.from_url(server.url, decode_responses=True))
        agent = ScriptedAgent(redis)
        agent.join()
        until(lambda: controller.client.nodes().items)
        scene = set_scene(controller, agent)
        plan = plan_in(scene)
        browser = stack.enter_context(chromium(program))
        for name, (route, landmark) in routes(scene, plan.id).items():
            page = browser.new_page(
                viewport={"width": chosen.width, "height": HEIGHT}, color_scheme=chosen.scheme
            )
            tab = Visit(page, controller.url)
            tab.listen()
            agent.beat(scene.gang, 120)
            tab.open(route)
            expect(page.locator(landmark).first).to_be_visible()
            page.screenshot(
                path=chosen.output / f"{name}.png", full_page=name in {"job", "compare"}
            )
            if tab.complaints:
                sys.exit(f"{name}: {tab.complaints}")
            page.close()


if __name__ == "__main__":
    main()
