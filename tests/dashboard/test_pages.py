"""The pages beside those of a job: each against a real controller on a real Redis."""

import csv
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Locator, Page, expect

from services.contract.api.plan_views import PlanView
from services.contract.messages.commands import LaunchGang, VerifyCheckpoint
from services.contract.words.states import JobState, NodeState
from services.local.embedded_redis import EmbeddedRedis
from tests.dashboard.scene import STEPS, Scene, spec
from tests.dashboard.scripted_agent import ScriptedAgent
from tests.dashboard.tabs import Controller, Visit
from tests.waiting import until

pytestmark = pytest.mark.redis

Open = Callable[..., Visit]


def _chart(page: Page, measure: str) -> Locator:
    return page.locator(f'[data-metric="{measure}"]')


def _saved(page: Page, button: Locator, folder: Path) -> Path:
    with page.expect_download() as download:
        button.click()
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


def _write(page: Page, editor: Locator, text: str) -> None:
    """Replace what an editor holds, by keys: `fill` would have Chromium write inline styles."""
    editor.focus()
    page.keyboard.press("Control+A")
    page.keyboard.press("Delete")
    for line in text.splitlines(keepends=True):
        page.keyboard.insert_text(line.rstrip("\n"))
        if line.endswith("\n"):
            page.keyboard.press("Escape")
            page.keyboard.press("Enter")


def test_charts_zoom_smooth_and_leave_as_csv_and_png(
    scene: Scene, visit: Open, tmp_path: Path
) -> None:
    page = visit(viewport={"width": 1280, "height": 1000}).open(f"#/jobs/{scene.running.id}")
    loss = _chart(page, "loss")
    plot, readout = loss.get_by_role("img"), loss.locator(".readout")
    expect(readout).to_contain_text("step 120")
    for measure in ("grad_norm", "learning_rate", "step_time_s", "memory_bytes", "user:accuracy"):
        expect(_chart(page, measure).locator("canvas")).to_be_visible()

    plot.focus()
    page.keyboard.press("ArrowLeft")
    expect(readout).to_contain_text("step 119")
    whole = f"/v1/jobs/{scene.running.id}/metrics"
    with page.expect_response(re.compile(re.escape(whole) + r".*from_step=\d+&to_step=\d+")):
        page.keyboard.press("+")
    page.get_by_role("button", name="Reset zoom").click()
    expect(page.get_by_role("button", name="Reset zoom")).to_be_disabled()

    page.get_by_role("button", name="time", exact=True).click()
    # 120 steps of 310 ms, 400 ms apart.
    expect(readout).to_contain_text("after 47 s")
    page.get_by_label("Smoothing").select_option("none")
    expect(loss.locator(".keys")).not_to_contain_text("smoothed")

    table = _saved(page, page.get_by_role("button", name="CSV"), tmp_path)
    with table.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))
    assert float(rows[99]["validation_loss"]) == 2.1
    assert float(rows[-1]["accuracy"]) == 0.8
    assert float(rows[-1]["loss"]) == pytest.approx(1.5 + 4 / 7 - 0.05)
    picture = _saved(page, page.get_by_role("button", name="PNG of Loss"), tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_runs_are_overlaid_and_their_specs_stand_side_by_side(scene: Scene, visit: Open) -> None:
    page = visit().open("#/jobs")
    page.get_by_label("Choose stdlib-gpt").check()
    page.get_by_label("Choose broken-shapes").check()
    page.get_by_role("group", name="Chosen jobs").get_by_role("link", name="Compare").click()
    loss = _chart(page, "loss")
    expect(loss.locator(".keys")).to_contain_text("stdlib-gpt")
    expect(loss.locator(".keys")).to_contain_text("broken-shapes")
    summary = re.compile(r"^Loss: .*broken-shapes \d.*stdlib-gpt \d")
    expect(loss.get_by_role("img", name=summary)).to_be_visible()
    steps = page.locator('[data-pointer="/train/steps"] td')
    expect(steps).to_have_text(["900", "600"])
    expect(page.locator('[data-pointer="/data/factory"]')).to_have_count(0)
    page.get_by_label("equal fields too").check()
    expect(page.locator('[data-pointer="/data/factory"]')).to_contain_text("stdlib_bytes")
    page.get_by_role("button", name="Remove broken-shapes").click()
    expect(loss.locator(".keys")).to_contain_text("smoothed")
    page.get_by_label("Add a run").select_option(scene.failed.id)
    expect(loss.locator(".keys")).to_contain_text("broken-shapes")


def test_the_queue_tells_who_waits_why_and_since_when(scene: Scene, visit: Open) -> None:
    page = visit().open("#/queue")
    row = page.locator(f'tr[data-job="{scene.waiting.id}"]')
    (entry,) = [e for e in scene.controller.client.queue().items if e.job_id == scene.waiting.id]
    expect(row).to_contain_text("four-ranks")
    expect(row).to_contain_text(entry.reason)
    expect(row.locator("td").nth(4)).to_have_text(re.compile(r"^(\d+ m )?\d+ s$"))
    expect(page.get_by_role("region", name="Free now")).to_contain_text("of 4")


def test_of_a_long_queue_fifty_rows_are_shown_and_more_when_asked(
    scene: Scene, visit: Open
) -> None:
    client = scene.controller.client
    jobs = [client.submit(spec(f"one-of-many-{n}", ranks=4, priority=-2)).id for n in range(51)]
    until(lambda: set(jobs) <= {entry.job_id for entry in client.queue().items})
    waiting = len(client.queue().items)
    page = visit().open("#/queue")
    expect(page.get_by_text(f"{waiting} jobs wait")).to_be_visible()
    expect(page.locator("tr[data-job]")).to_have_count(50)
    page.get_by_role("button", name=f"{waiting - 50} more…").click()
    expect(page.locator("tr[data-job]")).to_have_count(waiting)
    for job_id in jobs:
        client.kill(job_id)
        client.delete(job_id)


def test_the_log_is_searched_filtered_followed_and_kept(
    scene: Scene, visit: Open, tmp_path: Path
) -> None:
    tab = visit()
    page = tab.open(f"#/jobs/{scene.running.id}/logs")
    lines = page.get_by_role("log", name="Log lines")
    expect(lines).to_contain_text(f"rank 0 made step {STEPS}")
    until(lambda: tab.count(200, "/logs?follow=true"))
    asked = sum("/logs" in url for url in tab.asked)
    scene.agent.write(scene.gang, 1, "rank 1 says more")
    expect(lines).to_contain_text("rank 1 says more")
    assert sum("/logs" in url for url in tab.asked) == asked  # it came by the stream
    page.get_by_label("Level").select_option("errors")
    expect(lines).to_contain_text("slow disk")
    expect(lines).not_to_contain_text("rank 0 made step")
    page.get_by_label("Level").select_option("all levels")
    page.get_by_label("Search the log").fill("MADE step 60")
    expect(lines.locator(".line")).to_have_count(1)
    expect(lines.locator("mark")).to_have_text("made step 60")
    kept = _saved(page, page.get_by_role("button", name="Download"), tmp_path).read_text()
    assert re.fullmatch(r"[-\d]+T[:.\d]+Z rank 0 stdout rank 0 made step 60\n", kept)
    tab.expected = ("ERR_",)  # a stream that is left says so


def test_a_failed_job_is_resumed_from_a_checkpoint_of_its_own(scene: Scene, visit: Open) -> None:
    client = scene.controller.client
    job = client.submit(spec("to-be-resumed"))
    gang = scene.agent.launch(job.id)
    scene.agent.train(gang, [1, 2, 3])
    name = scene.agent.checkpoint(gang, 2)
    until(lambda: client.job(job.id).latest_checkpoint)
    page = visit().open(f"#/checkpoints?job={job.id}")
    row = page.locator(f'tr[data-checkpoint="{name}"]')
    expect(row.get_by_role("button", name="Clone from…")).to_be_visible()
    expect(row.get_by_role("button", name="Resume from")).to_have_count(0)
    scene.agent.crash(gang, 3, "ValueError: no", "ValueError: no")
    row.get_by_role("button", name="Resume from").click()
    again = until(
        lambda: next((c for c in [scene.agent.command(LaunchGang, job.id)] if c.fence == 2), None)
    )
    assert again.resume_from == name
    client.kill(job.id)
    scene.agent.drain(again, 2)  # its slots are free again


def test_checkpoints_are_verified_pinned_exported_and_cloned_from(
    scene: Scene, visit: Open, tmp_path: Path
) -> None:
    client = scene.controller.client
    tab = visit()
    page = tab.open(f"#/checkpoints?job={scene.running.id}")
    row = page.locator(f'tr[data-checkpoint="{scene.checkpoint}"]')
    row.get_by_role("button", name="Verify").click()
    asked = scene.agent.command(VerifyCheckpoint, scene.running.id)
    assert asked.checkpoint_id == scene.checkpoint
    row.get_by_role("button", name="Pin", exact=True).click()
    expect(row).to_contain_text("pinned")
    row.get_by_role("button", name="Delete…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Delete").click()
    expect(dialog.get_by_role("alert")).to_contain_text("pinned")
    dialog.get_by_role("button", name="Keep it").click()
    tab.expected = ("409",)
    row.get_by_role("button", name="Unpin").click()
    expect(row.get_by_role("button", name="Pin", exact=True)).to_be_visible()
    row.get_by_role("button", name="Export").click()
    weights = bytes(range(256)) * 9
    made_of = {"model.safetensors": weights, "config.json": b"{}"}
    scene.agent.export(scene.running.id, scene.controller.storage, made_of)
    files = page.get_by_label("Files of the export of step 100")
    expect(files.get_by_role("link")).to_have_text(["model.safetensors", "config.json"])
    kept = _saved(page, files.get_by_role("link", name="model.safetensors"), tmp_path)
    assert kept.read_bytes() == weights
    row.get_by_role("button", name="Clone from…").click()
    dialog.get_by_label("Name").fill("a-clone")
    dialog.get_by_label("Steps").fill("700")
    dialog.get_by_role("button", name="Clone job").click()
    expect(page.get_by_role("heading", name="a-clone")).to_be_visible()
    made = client.job(page.url.rsplit("/", maxsplit=1)[1])
    assert made.cloned_from is not None
    assert made.cloned_from.checkpoint_id == scene.checkpoint
    assert made.spec.train.steps == 700
    client.kill(made.id)


def test_webhooks_are_added_and_removed(scene: Scene, visit: Open) -> None:
    client = scene.controller.client
    tab = visit()
    page = tab.open("#/webhooks")
    expect(page.get_by_text("No webhooks.")).to_be_visible()
    page.get_by_role("button", name="New webhook…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("URL of the receiver").fill("http://127.0.0.1/hook")
    dialog.get_by_role("button", name="Add webhook").click()
    expect(dialog.get_by_role("alert")).to_contain_text("https")
    tab.expected = ("422",)
    dialog.get_by_label("URL of the receiver").fill("https://192.0.33.8/hook?key=hidden")
    # Nothing of this kind ever happens: nothing is sent.
    dialog.get_by_label("Kinds of events").fill("never.sent, of_no.kind")
    dialog.get_by_label("Labels of jobs").fill("team=vision")
    dialog.get_by_role("button", name="Add webhook").click()
    secret = dialog.get_by_label("New secret").input_value()
    assert secret.startswith("whsec_")
    dialog.get_by_role("button", name="Done").click()
    (made,) = client.webhooks().items
    assert (made.kinds, made.labels) == (("never.sent", "of_no.kind"), ("team=vision",))
    row = page.locator(f'tr[data-webhook="{made.id}"]')
    expect(row).to_contain_text("never.sent, of_no.kind of team=vision")
    for hidden in (secret, "key=hidden"):
        assert hidden not in page.content()
    row.get_by_role("button", name="Remove…").click()
    dialog.get_by_role("button", name="Remove").click()
    expect(row).to_have_count(0)
    assert client.webhooks().items == ()


def test_the_theme_is_chosen_and_remembered(visit: Open) -> None:
    page = visit().open("#/queue")
    root, choice = page.locator("html"), page.get_by_label("Theme")
    expect(root).to_have_attribute("data-theme", "light")
    page.emulate_media(color_scheme="dark")
    expect(root).to_have_attribute("data-theme", "dark")
    choice.select_option("light")
    expect(root).to_have_attribute("data-theme", "light")
    page.reload()
    expect(choice).to_have_value("light")
    expect(root).to_have_attribute("data-theme", "light")
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
    choice.select_option("system")
    expect(root).to_have_attribute("data-theme", "dark")


def test_a_spec_is_completed_checked_and_submitted(scene: Scene, visit: Open) -> None:
    client = scene.controller.client
    tab = visit()
    page = tab.open("#/submit")
    editor = page.get_by_label("Job spec as YAML")
    _write(page, editor, "name: written-here\ntrain: {stebs: 5, global_batch: four}\n")
    errors = page.get_by_label("Errors in the spec")
    expect(errors).to_contain_text("line 2 there is no field stebs; did you mean steps?")
    expect(errors).to_contain_text('line 2 "four" stands here; expected integer')
    page.keyboard.press("Control+End")
    for typed, completed in (("reso", "resources"), ("{dev", "device"), ("cp", "cpu")):
        page.keyboard.type(typed)
        page.get_by_role("option", name=completed).click()
    expect(editor).to_contain_text("resources: {device: cpu")

    text = "name: written-here\nmodel: {factory: decodr}\ndata: {factory: stdlib_bytes}\ntrain: {steps: 5}"
    _write(page, editor, text)
    expect(errors).to_have_count(0)
    page.get_by_role("button", name="Check").click()
    expect(errors).to_contain_text(re.compile("line 2 .*decodr"))  # only the controller knows that
    tab.expected = ("422",)

    page.goto(f"{tab.origin}/#/submit?from={scene.waiting.id}")
    expect(editor).to_contain_text("ranks: 4")
    expect(editor).not_to_contain_text("max_restarts: 3")
    page.get_by_role("button", name="Check").click()
    expect(page.get_by_text("The controller accepts this spec.")).to_be_visible()
    page.get_by_role("button", name="Submit job").click()
    expect(page.get_by_role("heading", name="four-ranks")).to_be_visible()
    made = client.job(page.url.rsplit("/", maxsplit=1)[1])
    assert made.spec == client.job(scene.waiting.id).spec
    client.kill(made.id)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name: *nothing", "line 1 Unresolved alias"),
        (
            "a: &a [x, x, x]\n"
            + "".join(
                f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
                for before, name in itertools.pairwise("abcdef")
            ),
            "line 1 Excessive alias count",
        ),
    ],
    ids=["no anchor", "many aliases"],
)
def test_whatever_is_typed_as_a_spec_is_an_error_at_most(visit: Open, text: str, told: str) -> None:
    tab = visit()
    page = tab.open("#/submit")
    editor = page.get_by_label("Job spec as YAML")
    _write(page, editor, text)
    expect(page.get_by_label("Errors in the spec")).to_contain_text(told)
    _write(page, editor, "train: {stebs: 5}")
    expect(page.get_by_label("Errors in the spec")).to_contain_text("did you mean steps?")
    assert tab.complaints == []


def test_a_plan_is_submitted_as_it_is(scene: Scene, plan: PlanView, visit: Open) -> None:
    client = scene.controller.client
    page = visit().open("#/submit")
    wanted = spec("previewed", ranks=4) | {"plan": "auto"}
    _write(page, page.get_by_label("Job spec as YAML"), json.dumps(wanted))
    page.get_by_role("button", name="Plan", exact=True).click()
    preview = page.locator(".preview")
    expect(preview).to_contain_text("feasible")
    expect(preview).to_contain_text("Peak memory / limit")
    page.get_by_role("button", name="Submit this plan").click()
    expect(page.get_by_role("heading", name="previewed")).to_be_visible()
    previewed = client.job(page.url.rsplit("/", maxsplit=1)[1])
    assert previewed.estimate is not None
    client.kill(previewed.id)
    page.goto(f"{scene.controller.url}/#/plans/{plan.id}")
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(page.get_by_label("Job", exact=True)).to_contain_text("to-be-planned")
    planned = client.job(page.url.rsplit("/", maxsplit=1)[1])
    assert planned.estimate is not None
    assert planned.estimate.plan_id == plan.id
    client.kill(planned.id)


def test_chosen_jobs_are_stopped_together_and_sorted(scene: Scene, visit: Open) -> None:
    client = scene.controller.client
    made = [client.submit(spec(f"many-{number}", ranks=4, priority=number)) for number in (1, 2)]
    page = visit().open("#/jobs?q=many-&sort=priority")
    names = page.locator("tr[data-job] .name")
    expect(names).to_have_text(["many-1", "many-2"])
    page.get_by_label("Order").select_option("highest priority first")
    expect(names).to_have_text(["many-2", "many-1"])
    page.get_by_label("Choose all jobs").check()
    chosen = page.get_by_role("group", name="Chosen jobs")
    chosen.get_by_role("button", name="Cancel").click()
    chosen.get_by_role("button", name="Cancel now 2").click()
    ended = JobState.CANCELLED
    until(lambda: all(client.job(job.id).state == ended for job in made))
    expect(page.locator("tr[data-job]").first).to_contain_text("cancelled")
    page.goto(page.url.split("#")[0] + f"#/jobs/{made[0].id}")
    expect(page.get_by_text("The job ended before its first attempt.")).to_be_visible()


POOLS: Final = """
pools:
  - {name: hpc, kind: slurm, cpu_slots: 4, max_nodes: 4, bin: /nowhere}
  - {name: spare, kind: slurm, cpu_slots: 1, max_nodes: 1, bin: /nowhere}
"""


def test_pools_say_what_they_bring_for_whom_and_what_is_wrong(visit: Open, tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text(POOLS)
    with (
        EmbeddedRedis.start(tmp_path) as redis,
        Controller(redis.url, tmp_path, MESHLOOM_POOLS_FILE=str(file)) as controller,
    ):
        job = controller.client.submit(spec("wide", ranks=8))
        tab = visit(controller.url)
        page = tab.open("#/nodes")
        row = page.locator("[data-pool=hpc]")
        expect(row).to_contain_text("2 of 4")
        expect(row).to_contain_text("requested")
        expect(row).to_contain_text("the pool does not answer")
        expect(row.get_by_role("link")).to_have_attribute("href", f"#/jobs/{job.id}")
        expect(page.locator("[data-pool=spare]")).to_contain_text("0 of 1")
        page.close()  # before its controller, of whose end it would complain


def test_a_node_is_drained_taken_back_and_forgotten(scene: Scene, visit: Open) -> None:
    client = scene.controller.client
    other = ScriptedAgent(scene.agent.redis, node_id="loom-spare")
    other.join(slots=1)
    page = visit().open("#/nodes")
    card = page.locator('[data-node="loom-spare"]')
    card.get_by_role("button", name="Drain…").click()
    page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    expect(card).to_contain_text("draining")
    assert {n.id: n.state for n in client.nodes().items}["loom-spare"] == NodeState.DRAINING
    card.get_by_role("button", name="Undrain").click()
    expect(card).to_contain_text("ready")
    other.leave()
    card.get_by_role("button", name="Forget").click()
    expect(card).to_have_count(0)
    assert "loom-spare" not in {node.id for node in client.nodes().items}


def test_tokens_are_made_and_revoked_and_the_trail_tells(scene: Scene, visit: Open) -> None:
    client = scene.controller.client
    page = visit().open("#/access")
    page.get_by_role("button", name="New token…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Subject").fill("ada")
    dialog.get_by_label("Scope").select_option("viewer")
    dialog.get_by_role("button", name="Make token").click()
    secret = dialog.get_by_label("New token").input_value()
    assert len(secret) > 20
    dialog.get_by_role("button", name="Done").click()
    (made,) = [token for token in client.tokens().items if token.subject == "ada"]
    row = page.locator(f'tr[data-token="{made.id}"]')
    expect(row).to_contain_text("viewer")
    assert secret not in page.content()
    row.get_by_role("button", name="Revoke…").click()
    dialog.get_by_role("button", name="Revoke").click()
    expect(row).to_have_count(0)
    trail = page.get_by_role("region", name="Audit trail", exact=True)
    expect(trail).to_contain_text(f"DELETE /v1/tokens/{made.id}")


def test_four_thousand_ranks_fit_on_a_screen(scene: Scene, visit: Open) -> None:
    client = scene.controller.client
    large = ScriptedAgent(scene.agent.redis, node_id="loom-large")
    large.join(slots=8192)  # others that wait take some
    until(lambda: "loom-large" in {node.id for node in client.nodes().items})
    wanted = spec("four-thousand", ranks=4096) | {"train": {"steps": 9, "global_batch": 4096}}
    job = client.submit(wanted)
    gang = large.launch(job.id)
    large.train(gang, [1])
    large.beat(gang, 1)
    page = visit(viewport={"width": 1280, "height": 800}).open(f"#/jobs/{job.id}")
    grid = page.locator(".rank-grid canvas")
    expect(page.locator(".rank-grid .legend")).to_contain_text("4096 forward")
    size = grid.bounding_box()
    assert size is not None
    assert size["width"] <= 1240
    assert size["height"] <= 420
    grid.hover(position={"x": 3, "y": 3})
    expect(page.locator(".rank-grid .pointed")).to_contain_text("rank 0 on loom-large")
    grid.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".rank-grid .pointed")).to_contain_text("rank 1 on loom-large")
    expect(page.locator("tr[data-rank]")).to_have_count(64)
    page.get_by_label("Order of the ranks").select_option("by memory")
    expect(page.locator("tr[data-rank]").first).to_contain_text("16 GiB")
    client.kill(job.id)
