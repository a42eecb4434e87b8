"""How the pages look, from a phone to a wall, in both themes, and to those who do not see them."""

import contextlib
import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect
from tenacity import RetryError

from services.contract.api.plan_views import PlanView
from tests.dashboard.pictures import BASELINES, COMPARED, HEIGHT, WIDTH, Comparison, routes, settled
from tests.dashboard.scene import STEPS, Scene
from tests.dashboard.tabs import Controller, Visit
from tests.waiting import until

pytestmark = pytest.mark.redis

# Of the worst band of rows. Other ages and ids make less than 0.01; a panel without its padding, or
# bars that float above their numbers, make 0.2 and more.
_MOST_DIFFERENT: Final = 0.025
_WIDTHS: Final = (360, 3840)
_FITS: Final = "document.documentElement.scrollWidth <= innerWidth"
_TOO_WIDE: Final = """() => [...document.querySelectorAll("main *")]
  .filter((one) => one.getBoundingClientRect().right > innerWidth && !one.closest(".scroller, .holder"))
  .map((one) => `${one.tagName}.${one.className}`).slice(0, 12)"""
_RULES: Final = """async (runOnly) => {
  const found = await axe.run(document, {
    runOnly,
    resultTypes: ["violations"],
  });
  return found.violations
    .filter(({ impact }) => impact === "serious" || impact === "critical")
    .map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.target.join(" ")).join(", ")}`);
}"""

# What can be used on a page.
_STOPS: Final = """() => {
  window.met = new Set();
  window.unseen = new Set();
  const used = "a[href], button, select, input, textarea, summary, [tabindex='0']";
  window.stops = [...document.querySelectorAll(used)].filter(
    (one) => !one.disabled && one.tabIndex >= 0 && one.checkVisibility({ visibilityProperty: true }),
  );
  document.addEventListener("focusin", ({ target }) => {
    window.met.add(target);
    const { outlineStyle, boxShadow } = getComputedStyle(target);
    if (outlineStyle === "none" && boxShadow === "none") window.unseen.add(target);
  });
  return window.stops.length;
}"""
_UNREACHED: Final = """() => {
  const name = (one) => `${one.tagName}.${one.className} ${one.textContent.slice(0, 30)}`;
  return [
    ...window.stops.filter((one) => one.isConnected && !window.met.has(one)).map((one) => `not reached: ${name(one)}`),
    ...[...window.unseen].filter((one) => one !== document.body).map((one) => `focus is not seen: ${name(one)}`),
  ];
}"""


@dataclass
class Walk:
    """What was found on one walk over all pages."""

    fonts: str
    pictures: dict[str, bytes] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    faults: dict[str, list[str]] = field(default_factory=dict)
    wide: list[tuple[str, int, list[str]]] = field(default_factory=list)
    unreached: dict[str, list[str]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def walk(
    scene: Scene, plan: PlanView, browser: Browser, controller: Controller, installed: Path
) -> Walk:
    axe = (installed / "node_modules/axe-core/axe.min.js").read_text()
    comparison = Comparison(browser)
    found = Walk(comparison.fonts)
    known_fonts = json.loads((BASELINES / "fonts.json").read_text())
    size = ViewportSize(width=WIDTH, height=HEIGHT)
    tab = Visit(browser.new_page(viewport=size), controller.url)
    tab.listen()
    for name, (route, landmark) in routes(scene, plan).items():
        page = tab.open(route)
        settled(page, landmark)

        def looks_as_before(name: str = name, page: Page = page) -> bool:
            scene.agent.beat(scene.gang, STEPS)
            expect(page.locator("tr.stale")).to_have_count(0)
            if name not in COMPARED:
                return True
            found.pictures[name] = comparison.shrunk(page)
            baseline = (BASELINES / f"{name}.png").read_bytes()
            found.differences[name] = comparison.difference(found.pictures[name], baseline)
            return found.differences[name] < _MOST_DIFFERENT

        # On a busy machine a rank may be shown as silent by the time that the picture is taken.
        with contextlib.suppress(RetryError):
            until(looks_as_before, timeout_s=60 if found.fonts == known_fonts else 0)
        page.evaluate(axe)
        faults = page.evaluate(_RULES, ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"])
        _show_in(page, "dark")
        faults += page.evaluate(_RULES, {"type": "rule", "values": ["color-contrast"]})
        _show_in(page, "light")
        if faults:
            found.faults[name] = faults
        if unreached := _unreached_by_keyboard(page):
            found.unreached[name] = unreached
        for width in _WIDTHS:
            page.set_viewport_size(ViewportSize(width=width, height=HEIGHT))
            try:
                until(functools.partial(page.evaluate, _FITS), timeout_s=20)
            except RetryError:
                found.wide.append((name, width, page.evaluate(_TOO_WIDE)))
        page.set_viewport_size(size)
    assert tab.complaints == []
    assert tab.foreign == []
    tab.page.close()
    comparison.close()
    return found


def _show_in(page: Page, scheme: Literal["dark", "light"]) -> None:
    """A busy browser takes a moment; of a change and its opposite at once it may have the first alone."""
    page.emulate_media(color_scheme=scheme)
    expect(page.locator("html")).to_have_attribute("data-theme", scheme)


def _unreached_by_keyboard(page: Page) -> list[str]:
    """What Tab does not come to, and what does not show that it has the focus."""
    stops = page.evaluate(_STOPS)
    has_editor = page.locator(".editor").count() > 0
    for _ in range(stops + 2):
        if has_editor:  # there Tab indents, but not after Escape
            page.keyboard.press("Escape")
        page.keyboard.press("Tab")
    return [str(each) for each in page.evaluate(_UNREACHED)]


def test_pages_look_as_their_baseline_pictures(walk: Walk, tmp_path: Path) -> None:
    """After a wanted change: ``python -m tests.dashboard.pictures --baselines``."""
    if json.loads((BASELINES / "fonts.json").read_text()) != walk.fonts:
        pytest.skip("the baseline pictures were taken with other fonts than this machine has")
    for name, picture in walk.pictures.items():
        (tmp_path / f"{name}.png").write_bytes(picture)
    assert max(walk.differences.values()) < _MOST_DIFFERENT, (walk.differences, tmp_path)


def test_axe_finds_nothing_serious_on_any_page(walk: Walk) -> None:
    assert walk.faults == {}


def test_the_keyboard_reaches_all_that_can_be_used_and_shows_where_it_is(walk: Walk) -> None:
    assert walk.unreached == {}


def test_no_page_scrolls_sideways_on_phones_or_walls(walk: Walk) -> None:
    assert walk.wide == []
