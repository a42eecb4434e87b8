"""Takes the pictures of the dashboard: ``python -m tests.dashboard.pictures``.

They go to ``docs``; with ``--baselines`` small grey ones go to ``tests/dashboard/baselines``, with
which ``test_appearance`` compares what it sees. A real controller on a real Redis answers; the scripted
agent tells what ranks would. Needs Chromium.
"""

import argparse
import base64
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from playwright.sync_api import Browser, Page, ViewportSize, expect
from redis import Redis

from services.contract.api.plan_views import PlanView
from services.local.embedded_redis import EmbeddedRedis
from tests.dashboard.scene import STEPS, Scene, plan_in, set_scene
from tests.dashboard.scripted_agent import ScriptedAgent
from tests.dashboard.tabs import Controller, Visit, chromium, chromium_program
from tests.waiting import until

DOCUMENTED: Final = Path(__file__).parents[2] / "docs"
_OWN_PLACES: Final = {"job": "dashboard.png", "plan": "plan.png"}
BASELINES: Final = Path(__file__).parent / "baselines"
COMPARED: Final = ("jobs", "job", "failed", "compare", "queue", "plan", "checkpoints", "submit")
WIDTH: Final = 1280
HEIGHT: Final = 800
_SHRUNK: Final = 4
# Draws a picture a quarter as wide and high, in greys.
_SHRINK: Final = """async ([picture, part]) => {
  const bytes = Uint8Array.from(atob(picture), (letter) => letter.charCodeAt(0));
  const bitmap = await createImageBitmap(new Blob([bytes]));
  const [width, height] = [Math.round(bitmap.width / part), Math.round(bitmap.height / part)];
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d");
  context.filter = "grayscale(1)";
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  return canvas.toDataURL("image/png").split(",")[1];
}"""
# Ages are as wide as they are old, and ids as their letters: a line with one may break or not.
_AGELESS: Final = """() => {
  document.querySelectorAll("time, .elapsed, .eta").forEach((one) => { one.textContent = "1 m"; });
  const texts = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode;
    const same = text.data.replace(/[0-9a-hjkmnp-tv-z]{26}/g, "0".repeat(26));
    if (same !== text.data) text.data = same;
  }
}"""
# Of the band of rows that differs most, the share of pixels that differ by more than a fifth of the
# range. What one picture has below the end of the other differs in full.
_DIFFER: Final = """async ([one, other]) => {
  const pixels = async (picture) => {
    const bytes = Uint8Array.from(atob(picture), (letter) => letter.charCodeAt(0));
    const bitmap = await createImageBitmap(new Blob([bytes]));
    const canvas = Object.assign(document.createElement("canvas"), bitmap);
    canvas.width = bitmap.width; canvas.height = bitmap.height;
    const context = canvas.getContext("2d");
    context.drawImage(bitmap, 0, 0);
    return context.getImageData(0, 0, bitmap.width, bitmap.height);
  };
  const [a, b] = [await pixels(one), await pixels(other)];
  if (a.width !== b.width) return 1;
  const height = Math.min(a.height, b.height);
  const band = 20 * a.width;
  const differ = new Array(Math.ceil((height * a.width) / band)).fill(0);
  for (let at = 0; at < height * a.width; at++) {
    differ[Math.floor(at / band)] += Math.abs(a.data[4 * at] - b.data[4 * at]) > 50 ? 1 : 0;
  }
  return Math.max(...differ, Math.abs(a.height - b.height) * a.width) / band;
}"""
# What text looks like here: pictures of machines with other fonts are no use for comparison.
_FONTS: Final = """() => ["ui-sans-serif, system-ui, sans-serif", "ui-monospace, monospace"].map((family) => {
  const context = document.createElement("canvas").getContext("2d");
  context.font = `13px ${family}`;
  return context.measureText("Meshloom 0123456789 ranks").width.toFixed(2);
}).join(" ")"""


def routes(scene: Scene, plan: PlanView) -> dict[str, tuple[str, str]]:
    """Of each page its name, its address, and what is there once it is loaded, by `&`."""
    job = scene.running.id
    charts = "[data-metric=step_time_s] .plot canvas"
    panels = f"{charts} & .timeline .event & [aria-label='Attempts, newest first'] tr"
    return {
        "jobs": ("#/jobs", f'tr[data-job="{job}"] polyline'),
        "job": (
            f"#/jobs/{job}",
            f"{panels} & [data-metric=memory_bytes] & .log .line & .rank-grid canvas",
        ),
        "failed": (f"#/jobs/{scene.failed.id}", f"{panels} & .diagnosis"),
        "compare": (
            f"#/compare?jobs={job},{scene.failed.id}",
            "[data-metric='user:accuracy'] canvas & [data-pointer='/train/steps']",
        ),
        "queue": ("#/queue", "tr[data-job]"),
        "plan": (f"#/plans/{plan.id}", ".stack i"),
        "plans": ("#/plans", "tr[data-plan]"),
        "submit": (f"#/submit?from={job}", ".cm-line"),
        "checkpoints": (f"#/checkpoints?job={job}", "tr[data-checkpoint]"),
        "logs": (f"#/jobs/{job}/logs", ".log .line"),
        "nodes": ("#/nodes", "[data-node]"),
        "webhooks": ("#/webhooks", "text=New webhook…"),
        "access": ("#/access", ".audit tr"),
        "login": ("#/login", "form.login"),
    }


def settled(page: Page, landmark: str) -> None:
    """Wait until a page is loaded: its landmark is there, and nothing says that it is awaited."""
    for part in landmark.split(" & "):
        expect(page.locator(part).first).to_be_visible()
    expect(page.locator(".awaited")).to_have_count(0)
    expect(page.get_by_text("Loading…")).to_have_count(0)


class Comparison:
    """Shrinks and compares pictures, in a page of its own.

    Args:
        browser: In which that page is opened.
    """

    def __init__(self, browser: Browser) -> None:
        self._page = browser.new_page()

    @property
    def fonts(self) -> str:
        """Widths of a text in the fonts of this machine."""
        return str(self._page.evaluate(_FONTS))

    def shrunk(self, page: Page) -> bytes:
        """A quarter-sized grey PNG of a whole page."""
        page.evaluate(_AGELESS)
        picture = base64.b64encode(page.screenshot(full_page=True)).decode()
        small = self._page.evaluate(_SHRINK, [picture, _SHRUNK])
        return base64.b64decode(small)

    def difference(self, one: bytes, other: bytes) -> float:
        """How much of the worst band of rows differs visibly between two shrunk pictures; 0: none."""
        pictures = [base64.b64encode(picture).decode() for picture in (one, other)]
        return float(self._page.evaluate(_DIFFER, pictures))

    def close(self) -> None:
        self._page.close()


@contextlib.contextmanager
def _stage() -> Iterator[tuple[Scene, PlanView]]:
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(EmbeddedRedis.start(home))
        controller = stack.enter_context(Controller(server.url, home))
        redis = stack.enter_context(Redis.from_url(server.url, decode_responses=True))
        agent = ScriptedAgent(redis)
        agent.join()
        until(lambda: controller.client.nodes().items)
        scene = set_scene(controller, agent)
        yield scene, plan_in(scene)


def main() -> None:
    """Take them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--baselines", action="store_true")
    parser.add_argument("--output", type=Path, default=DOCUMENTED)
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    parser.add_argument("--width", type=int, default=WIDTH)
    chosen = parser.parse_args()
    program = chromium_program()
    if program is None:
        sys.exit("no Chromium is installed: the dashboard cannot be looked at")
    folder = BASELINES if chosen.baselines else chosen.output
    folder.mkdir(parents=True, exist_ok=True)
    with chromium(program) as browser, _stage() as (scene, plan):
        comparison = Comparison(browser)
        for name, (route, landmark) in routes(scene, plan).items():
            if chosen.baselines and name not in COMPARED:
                continue
            viewport = ViewportSize(width=chosen.width, height=HEIGHT)
            page = browser.new_page(viewport=viewport, color_scheme=chosen.scheme)
            tab = Visit(page, scene.controller.url)
            tab.listen()
            tab.open(route)
            settled(page, landmark)
            scene.agent.beat(scene.gang, STEPS)
            expect(page.locator("tr.stale")).to_have_count(0)
            if chosen.baselines:
                (folder / f"{name}.png").write_bytes(comparison.shrunk(page))
            else:
                whole = name in {"job", "compare"}
                place = folder / _OWN_PLACES.get(name, f"pictures/{name}.png")
                page.screenshot(path=place, full_page=whole)
            if tab.complaints:
                sys.exit(f"{name}: {tab.complaints}")
            page.close()
        if chosen.baselines:
            (folder / "fonts.json").write_text(json.dumps(comparison.fonts) + "\n")


if __name__ == "__main__":
    main()
