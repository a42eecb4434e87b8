"""What people see in a browser, against a real controller on a real Redis."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from services.contract.api.access import Scope, TokenRequest
from services.contract.api.plan_views import PlanView
from services.contract.api.requests import JobPatch
from services.contract.api.views import JobView
from services.contract.messages.commands import StopGang, TakeCheckpoint
from services.contract.messages.telemetry import MetricRecord
from services.contract.redis import redis_keys
from services.contract.words.states import JobState
from services.local.embedded_redis import EmbeddedRedis
from tests.dashboard.scene import STEPS, TRACEBACK, Scene, spec
from tests.dashboard.scripted_agent import ScriptedAgent
from tests.dashboard.tabs import Controller, Visit
from tests.waiting import until

pytestmark = pytest.mark.redis

Open = Callable[..., Visit]

# Pixels of a curve: opaque and coloured, as neither grid nor labels are.
_COLOURED: Final = """(canvas) => {
  const copy = new OffscreenCanvas(canvas.width, canvas.height);
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let at = 0; at < data.length; at += 4) {
    const [red, green, blue, alpha] = data.subarray(at, at + 4);
    const spread = Math.max(red, green, blue) - Math.min(red, green, blue);
    count += alpha > 200 && spread > 40 ? 1 : 0;
  }
  return count;
}"""
# All that a person can use, and what of it the focus has not been on.
_CONTROLS: Final = """() => {
  const all = [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']")];
  window.unreached = new Set(all.filter((one) => !one.disabled && one.checkVisibility()));
  return [...window.unreached].map((one) => one.outerHTML.slice(0, 80));
}"""
_UNREACHED: Final = """() => {
  window.unreached.delete(document.activeElement);
  for (const one of window.unreached) if (!one.isConnected) window.unreached.delete(one);
  return [...window.unreached].map((one) => one.outerHTML.slice(0, 80));
}"""
# Whether a text ever stood on the page.
_WATCH: Final = """(text) => {
  window.told = false;
  new MutationObserver(() => { window.told ||= document.body.innerText.includes(text); })
    .observe(document.body, { childList: true, subtree: true, characterData: true });
}"""
_SHOW: Final = """(state) => {
  Object.defineProperty(document, "visibilityState", { configurable: true, get: () => state });
  Object.defineProperty(document, "hidden", { configurable: true, get: () => state === "hidden" });
  document.dispatchEvent(new Event("visibilitychange", { bubbles: true }));
}"""


def _row(page: Page, job: JobView) -> Locator:
    return page.locator(f'tr[data-job="{job.id}"]')


def _panel(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name=name, exact=True)


def _curve_pixels(page: Page) -> list[int]:
    canvases = page.locator("[data-metric] .plot canvas")
    return [int(canvas.evaluate(_COLOURED)) for canvas in canvases.all()]


def test_the_jobs_page_shows_state_progress_and_loss_of_each_job(
    scene: Scene, visit: Open, tmp_path: Path
) -> None:
    page = visit().open("#/jobs")
    running, waiting = _row(page, scene.running), _row(page, scene.waiting)
    expect(running).to_contain_text("running")
    expect(running).to_contain_text("stdlib-gpt")
    expect(running).to_contain_text("120 / 600")
    expect(running.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "20")
    expect(running.locator('[data-cell="loss"]')).to_contain_text(re.compile(r"\d\.\d{3}"))
    expect(running.locator('[data-cell="tokens"]')).to_contain_text("k")
    expect(waiting).to_contain_text("queued")
    names = page.locator("tr[data-job] .name")
    assert names.all_inner_texts().index("four-ranks") < names.all_inner_texts().index("stdlib-gpt")
    page.screenshot(path=tmp_path / "jobs.png", full_page=True)


def test_jobs_are_filtered_by_state_and_by_text(scene: Scene, visit: Open) -> None:
    page = visit().open("#/jobs")
    running, waiting = _row(page, scene.running), _row(page, scene.waiting)
    expect(running).to_be_visible()
    page.get_by_role("button", name="Waiting", exact=True).click()
    expect(running).to_have_count(0)
    expect(waiting).to_be_visible()
    page.get_by_role("button", name="Waiting", exact=True).click()
    page.get_by_label("Filter jobs by text").fill("stdlib")
    expect(waiting).to_have_count(0)
    expect(running).to_be_visible()
    page.get_by_label("Filter jobs by text").fill("nothing is called so")
    expect(page.get_by_text("No job matches")).to_be_visible()


def test_what_is_searched_for_follows_links_too(scene: Scene, visit: Open) -> None:
    tab = visit()
    page = tab.open("#/jobs")
    search = page.get_by_label("Filter jobs by text")
    search.fill("nothing is called so ")
    nothing = page.get_by_text("No job matches")
    expect(nothing).to_be_visible()
    expect(search).to_have_value("nothing is called so ")
    page.get_by_role("link", name="Show all jobs").click()
    expect(_row(page, scene.running)).to_be_visible()
    expect(search).to_have_value("")
    for text in ("neither is this", "nor this"):
        page.evaluate("(text) => { location.hash = `#/jobs?q=${text}`; }", text)
        expect(search).to_have_value(text)
        expect(nothing).to_be_visible()


def test_the_job_page_draws_a_curve_for_each_measure(
    scene: Scene, visit: Open, tmp_path: Path
) -> None:
    page = visit(viewport={"width": 1440, "height": 900}).open(f"#/jobs/{scene.running.id}")
    expect(page.locator(".plot canvas")).to_have_count(8)
    until(lambda: all(count > 300 for count in _curve_pixels(page)))
    expect(page.get_by_role("img", name=re.compile("Training loss from 5"))).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("Validation loss 2.1"))).to_be_visible()
    measured = "accuracy: 0.800 at step 120, in validation 0.500 at step 120."
    expect(page.get_by_role("img", name=measured)).to_be_visible()
    expect(page.get_by_role("img", name="toString: 1.200 at step 120.")).to_be_visible()
    page.get_by_role("button", name="log", exact=True).click()
    expect(page.get_by_role("button", name="log", exact=True)).to_have_attribute(
        "aria-pressed", "true"
    )
    until(lambda: all(count > 300 for count in _curve_pixels(page)))
    page.screenshot(path=tmp_path / "job.png", full_page=True)


def test_each_rank_has_a_row_and_a_silent_one_is_greyed(scene: Scene, visit: Open) -> None:
    page = visit().open(f"#/jobs/{scene.running.id}")
    first, second = page.locator('tr[data-rank="0"]'), page.locator('tr[data-rank="1"]')
    expect(first).to_contain_text("forward")
    expect(first).to_contain_text("blocks.3")
    expect(first).to_contain_text("1 GiB")
    expect(second).to_contain_text("2 GiB")
    expect(second.locator(".lag")).to_have_text(re.compile(r"^200 ms straggler$"))

    def is_shown_as_heard_of() -> bool:
        scene.agent.beat(scene.gang, STEPS)  # of which a busy browser may learn too late
        return "now" in first.inner_text()

    until(is_shown_as_heard_of)
    expect(first).to_contain_text(re.compile("silent for"))
    expect(first).to_have_class("stale")


def test_the_ranks_are_a_grid_that_arrow_keys_walk_through(scene: Scene, visit: Open) -> None:
    page = visit().open(f"#/jobs/{scene.running.id}")
    mesh = _panel(page, "Mesh")
    grid = mesh.get_by_role("img", name=re.compile("^2 ranks on 1 nodes, coloured by phase"))
    grid.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(mesh.locator(".pointed")).to_contain_text(
        re.compile(
            r"^rank 1 on loom-1 cpu · dp_shard 1 · [a-z-]+ · step 120 · lag 200 ms, straggler"
        )
    )
    before = grid.evaluate("canvas => canvas.toDataURL()")
    mesh.get_by_role("button", name="memory").click()
    until(lambda: page.locator(".rank-grid canvas").evaluate("c => c.toDataURL()") != before)
    expect(mesh.locator(".legend")).to_contain_text("16 GiB")


def test_checkpoints_attempts_events_and_logs_are_there(scene: Scene, visit: Open) -> None:
    page = visit().open(f"#/jobs/{scene.running.id}")
    row = page.locator(f'tr[data-checkpoint="{scene.checkpoint}"]')
    expect(row).to_contain_text("committed")
    expect(row).to_contain_text("latest")
    expect(row).to_contain_text("32 MiB")
    expect(_panel(page, "Attempts")).to_contain_text("running")
    expect(_panel(page, "Events")).to_contain_text("checkpoint.committed")
    log = _panel(page, "Log")
    expect(log).to_contain_text("rank 0 made step 120")
    expect(log).to_contain_text("rank 1 warns of a slow disk")
    log.get_by_label("Rank", exact=True).select_option("rank 1")
    expect(log).not_to_contain_text("rank 0 made step 120")
    log.get_by_label("Stream").select_option("stdout")
    expect(log).to_contain_text("No line matches")
    scene.agent.write(scene.gang, 1, "rank 1 found it again")
    expect(log).to_contain_text("rank 1 found it again")


def test_what_has_not_changed_is_answered_with_304(scene: Scene, visit: Open) -> None:
    tab = visit()
    page = tab.open(f"#/jobs/{scene.running.id}")
    expect(page.locator("tr[data-rank]")).to_have_count(2)

    def several_of_each() -> bool:
        page.wait_for_event("response")
        return all(tab.count(304, part) >= 2 for part in (scene.running.id, "/ranks", "/metrics"))

    until(several_of_each)
    expect(page.locator("tr[data-rank]")).to_have_count(2)
    assert tab.count(200, "/metrics") <= 2


def test_the_plans_page_leads_to_a_plan_with_its_memory_and_what_lost_against_it(
    plan: PlanView, visit: Open, tmp_path: Path
) -> None:
    page = visit().open("#/plans")
    row = page.locator(f'tr[data-plan="{plan.id}"]')
    expect(row).to_contain_text("feasible")
    expect(row).to_contain_text("to-be-planned")
    limit = plan.memory_limit_bytes
    assert limit is not None
    part = round(100 * max(kind.peak.total for kind in plan.memory) / limit)
    bar = row.get_by_role("progressbar", name="Peak memory / limit")
    expect(bar).to_have_attribute("aria-valuenow", str(part))
    page.get_by_role("button", name="Failed").click()
    expect(page.get_by_role("heading", name="No plan matches")).to_be_visible()
    page.get_by_role("button", name="Failed").click()
    row.get_by_role("link", name="to-be-planned").click()
    expect(page.get_by_role("heading", name="to-be-planned")).to_be_visible()
    meters = _panel(page, "Peak memory of a rank").get_by_role("meter")
    expect(meters).to_have_count(len(plan.memory))
    for meter, kind in zip(meters.all(), plan.memory, strict=True):
        expect(meter).to_have_attribute("aria-valuenow", str(kind.peak.total))
        drawn = meter.locator("i").evaluate_all("parts => parts.map(part => part.offsetWidth)")
        assert min(drawn) >= 1
        parts = kind.peak.model_dump(exclude={"total"}).values()
        assert len(drawn) == sum(part > 0 for part in parts)
    lost = _panel(page, "Layouts compared")
    for other in plan.alternatives:
        expect(lost).to_contain_text(other.lost_because)
    expect(lost.locator("tr.chosen")).to_contain_text("chosen")
    page.screenshot(path=tmp_path / "plan.png", full_page=True)


@pytest.mark.usefixtures("plan")
def test_a_node_shows_what_it_measured(visit: Open) -> None:
    page = visit().open("#/nodes")
    measured = page.get_by_role("region", name="Measured on cpu")
    for words in ("fp32", "bf16", "50.0 GFLOP/s", "10.0 GB/s", "100 µs", "90 %"):
        expect(measured).to_contain_text(words)


@pytest.mark.usefixtures("scene")
def test_the_nodes_page_shows_slots_memory_and_jobs(visit: Open) -> None:
    page = visit().open("#/nodes")
    card = page.locator('[data-node="loom-1"]')
    expect(card).to_contain_text("ready")
    expect(card.get_by_role("meter", name="CPU slots")).to_have_attribute("aria-valuenow", "2")
    expect(card).to_contain_text("16 GiB")
    card.get_by_role("link").click()
    expect(page.get_by_role("heading", name="stdlib-gpt")).to_be_visible()


def test_a_checkpoint_can_be_asked_for(scene: Scene, visit: Open) -> None:
    page = visit().open(f"#/jobs/{scene.running.id}")
    page.get_by_role("button", name="Checkpoint now").click()
    assert scene.agent.command(TakeCheckpoint, scene.running.id).fence == scene.gang.fence


def test_cancelling_asks_first_and_then_stops_the_job(
    controller: Controller, agent: ScriptedAgent, visit: Open
) -> None:
    job = controller.client.submit(spec("short-lived"))
    gang = agent.launch(job.id)
    agent.train(gang, [1])
    page = visit().open(f"#/jobs/{job.id}")
    expect(page.get_by_label("Job", exact=True)).to_contain_text("running")
    page.get_by_role("button", name="Cancel…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Keep it running").click()
    expect(dialog).to_have_count(0)
    assert controller.client.job(job.id).state == JobState.RUNNING

    page.get_by_role("button", name="Cancel…").click()
    dialog.get_by_label("No checkpoint").check()
    dialog.get_by_role("button", name="Cancel job").click()
    stop = agent.command(StopGang, job.id)
    assert (stop.mode, stop.checkpoint) == ("drain", "none")
    expect(page.get_by_label("Job", exact=True)).to_contain_text("cancelling")
    agent.drain(gang, 1)
    expect(page.get_by_label("Job", exact=True)).to_contain_text("cancelled")
    expect(page.get_by_role("button", name="Cancel…")).to_have_count(0)


def test_a_failed_job_shows_the_users_own_frame_first(scene: Scene, visit: Open) -> None:
    page = visit().open(f"#/jobs/{scene.failed.id}")
    failure = _panel(page, "Failure")
    expect(failure).to_contain_text("Rank 1 failed first on loom-1")
    own = failure.locator(".place")
    expect(own).to_contain_text("/home/ada/model.py:88 in forward")
    expect(own).to_contain_text("return x @ self.weight")
    whole = failure.get_by_role("region", name="Traceback")
    expect(whole).to_be_hidden()
    failure.get_by_text("Whole traceback").click()
    expect(whole).to_have_text(TRACEBACK)
    expect(failure).to_contain_text("3 frames, 2 of Meshloom and libraries")
    expect(page.get_by_label("Job", exact=True)).not_to_contain_text("mat1")
    diagnosis = _panel(page, "Diagnosis")
    expect(diagnosis).to_contain_text("user error · rank 1 on loom-1")
    expect(diagnosis).to_contain_text("the last frame of yours")
    expect(page.get_by_label("Job", exact=True)).to_contain_text("failed")


def test_a_refused_order_is_told_in_the_words_of_the_problem(
    controller: Controller, agent: ScriptedAgent, visit: Open
) -> None:
    job = controller.client.submit(spec("ends-too-soon"))
    gang = agent.launch(job.id)
    agent.train(gang, [1])
    tab = visit()
    page = tab.open(f"#/jobs/{job.id}")
    expect(page.get_by_role("button", name="Checkpoint now")).to_be_visible()
    # The job ends behind the page's back: what it shows is a moment old.
    held = {"x-held": "1"}
    # A poll that was under way before the route could still bring the news: wait for the next one.
    with page.expect_response(lambda response: "x-held" in response.headers):
        page.route(f"**/v1/jobs/{job.id}", lambda route: route.fulfill(status=304, headers=held))
    agent.crash(gang, 1, "RuntimeError: gone", "RuntimeError: gone")
    until(lambda: controller.client.job(job.id).state == JobState.FAILED)
    page.get_by_role("button", name="Checkpoint now").click()
    expect(page.get_by_role("alert")).to_contain_text(re.compile(r"\w+ \w+"))
    tab.expected = ("409",)


def test_pages_are_reached_and_jobs_are_opened_by_keyboard(scene: Scene, visit: Open) -> None:
    page = visit().open("#/jobs")
    link = _row(page, scene.running).get_by_role("link")
    expect(link).to_be_visible()
    link.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="stdlib-gpt")).to_be_visible()
    expect(page.locator("tr[data-rank]")).to_have_count(2)
    expect(page.locator(".awaited")).to_have_count(0)
    missed = page.evaluate(_CONTROLS)
    assert len(missed) > 30
    page.evaluate("document.activeElement.blur()")
    for _ in range(len(missed) + 20):
        page.keyboard.press("Tab")
        missed = page.evaluate(_UNREACHED)
        if not missed:
            break
    assert missed == []
    page.get_by_role("link", name="Nodes", exact=True).focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Nodes")).to_be_visible()


def test_a_hidden_tab_asks_nothing_and_asks_at_once_when_it_is_back(
    scene: Scene, visit: Open
) -> None:
    tab = visit()
    tab.page.clock.install()
    page = tab.open(f"#/jobs/{scene.running.id}")
    expect(page.locator("tr[data-rank]")).to_have_count(2)
    expect(page.locator(".plot canvas")).to_have_count(8)
    expect(page.locator(".awaited")).to_have_count(0)
    with page.expect_request(re.compile("/ranks")):
        page.clock.run_for(2_000)
    page.evaluate(_SHOW, "hidden")
    asked = len(tab.asked)
    page.clock.run_for(60_000)
    page.evaluate("fetch('version')")  # comes behind all that the minute may have asked
    assert tab.asked[asked:] == [f"{tab.origin}/version"]
    with page.expect_request(re.compile("/ranks")):
        page.evaluate(_SHOW, "visible")


def test_a_lost_controller_is_told_and_the_last_data_stays(scene: Scene, visit: Open) -> None:
    tab = visit()
    page = tab.open(f"#/jobs/{scene.running.id}")
    expect(page.locator("tr[data-rank]")).to_have_count(2)
    expect(page.locator(".plot canvas")).to_have_count(8)
    until(lambda: all(count > 300 for count in _curve_pixels(page)))
    scene.controller.kill()
    banner = page.get_by_text("Controller unreachable")
    try:
        expect(banner).to_be_visible()
        expect(page.get_by_role("status")).to_contain_text(re.compile(r"since \d\d:\d\d:\d\d"))
        expect(page.get_by_role("heading", name="stdlib-gpt")).to_be_visible()
        expect(page.locator("tr[data-rank]")).to_have_count(2)
        assert len(drawn := _curve_pixels(page)) == 8
        assert min(drawn) > 300
    finally:
        scene.controller.start()
    expect(banner).to_have_count(0)
    scene.controller.wait_until_ready()
    scene.agent.write(scene.gang, 0, "the controller is back")
    expect(_panel(page, "Log")).to_contain_text("the controller is back")
    tab.expected = ("ERR_", "503")


@pytest.fixture
def locked(redis_server: EmbeddedRedis, tmp_path: Path) -> Iterator[Controller]:
    settings = {"MESHLOOM_MAX_STREAMS": "1"}
    with Controller(redis_server.url, tmp_path, token="open-sesame", **settings) as controller:  # noqa: S106
        # Its only stream is taken, so that it refuses those of pages.
        headers = {"Authorization": "Bearer open-sesame", "Accept": "text/event-stream"}
        with httpx.stream("GET", f"{controller.url}/v1/events", headers=headers) as taken:
            taken.raise_for_status()
            yield controller


def test_a_token_is_asked_for_and_kept_and_without_streams_pages_poll(
    scene: Scene, locked: Controller, visit: Open
) -> None:
    tab = visit(locked.url)
    page = tab.open("#/jobs")
    field = page.get_by_label("Bearer token")
    field.fill("wrong")
    page.get_by_role("button", name="Use token").click()
    expect(page.get_by_text("did not accept this token")).to_be_visible()
    field.fill("open-sesame")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
    expect(page.locator("tr[data-job], .empty").first).to_be_visible()
    page.reload()
    expect(page.locator("tr[data-job], .empty").first).to_be_visible()
    expect(page.get_by_label("Bearer token")).to_have_count(0)
    page.evaluate(_WATCH, "Controller unreachable")
    with page.expect_response(lambda answer: answer.status == 503 and "events" in answer.url):
        page.goto(f"{tab.origin}/#/jobs/{scene.running.id}")
    events = _panel(page, "Events")
    expect(events.locator(".event").first).to_be_visible()
    locked.client.patch(scene.running.id, JobPatch(priority=7))
    expect(events).to_contain_text("priority")
    assert page.evaluate("window.told") is False
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_text("This controller asks for a token.")).to_be_visible()
    tab.expected = ("401", "503")


def test_who_logs_in_next_in_a_tab_is_shown_nothing_that_the_one_before_was_told(
    locked: Controller, visit: Open
) -> None:
    made = locked.client.create_token(TokenRequest(subject="vic", scope=Scope.VIEWER))
    tab = visit(locked.url)
    page = tab.open("#/access")
    page.get_by_label("Bearer token").fill("open-sesame")
    page.keyboard.press("Enter")
    expect(page.locator(f'tr[data-token="{made.id}"]')).to_be_visible()
    page.get_by_role("button", name="Log out").click()
    page.get_by_label("Bearer token").fill(made.token)
    page.keyboard.press("Enter")
    expect(page.get_by_text("this needs a token of scope operator").first).to_be_visible()
    expect(page.locator("tr[data-token], .audit")).to_have_count(0)
    tab.expected = ("401", "403")


def test_a_measure_of_large_numbers_that_hardly_differ_is_drawn(scene: Scene, visit: Open) -> None:
    client, agent = scene.controller.client, scene.agent
    job = client.submit(spec("large-numbers", ranks=1))
    gang = agent.launch(job.id)
    agent.train(gang, range(1, 5))
    for step in range(1, 5):
        record = MetricRecord(step=step, fence=gang.fence, values={"seen": 1e16 + 2 * (step % 2)})
        told: dict[Any, Any] = {redis_keys.MESSAGE_FIELD: record.model_dump_json()}
        agent.redis.xadd(redis_keys.job_metrics(job.id), told)
    page = visit().open(f"#/jobs/{job.id}")
    expect(page.locator('[data-metric="user:seen"]')).to_contain_text("1.00e+16")
    client.kill(job.id)
    agent.drain(gang, 4)


def test_words_without_end_are_broken_so_that_no_page_scrolls_sideways(
    scene: Scene, visit: Open
) -> None:
    client, agent, word = scene.controller.client, scene.agent, "W" * 3_000
    job = client.submit(spec("n" * 63) | {"labels": {"k" * 40: word[:256]}})
    gang = agent.launch(job.id)
    agent.train(gang, range(1, 5))
    agent.crash(gang, 4, word, f'Traceback:\n  File "/{word}", line 1, in f\n    {word}\n{word}')
    until(lambda: client.job(job.id).state == JobState.FAILED)
    tab = visit(viewport={"width": 360, "height": 800})
    for route in (f"jobs/{job.id}", f"jobs/{job.id}/logs", f"compare?jobs={job.id}"):
        page = tab.open(f"#/{route}")
        expect(page.get_by_text("n" * 63).first).to_be_visible()
        page.wait_for_function(
            "() => document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        )


@pytest.mark.usefixtures("scene")
def test_a_short_label_stays_on_one_line_where_the_table_of_jobs_scrolls(visit: Open) -> None:
    page = visit(viewport={"width": 760, "height": 800}).open("#/jobs")
    label = page.get_by_text("team=demo").first
    expect(label).to_be_visible()
    lines = "each => each.clientHeight / parseFloat(getComputedStyle(each).lineHeight)"
    assert round(label.evaluate(lines)) == 1
