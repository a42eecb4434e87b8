"""The pages on training of one's own: their snippets run, their specs train, their commands exist.

A ```python block begins with a comment that names its file; a ```yaml block that does is a whole
spec, and any other one is put over the first of all. All of them lie in one folder, from which ranks
import. Lines of ```sh blocks are read by the programs' own parsers.
"""

import importlib.util
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
import pytest
import typer
from ruamel.yaml import YAML

from fsdp_core.plan.model import UnitPlan
from services.cli.app import app
from services.contract.jobs.specs import JobSpec
from services.contract.messages.rank_pipe import RankEvaluated
from services.worker.rank import registry
from services.worker.rank.data.batches import rows
from services.worker.rank.data.feeds import feed_of
from services.worker.rank.data.share import Share
from tests.docs.test_engine_pages import LINK, NAMED_TEST, ROOT
from tests.rank.gang import ranks_below

PAGES: Final = (ROOT / "docs/your-own-training.md", ROOT / "docs/getting-started.md")
STEPS: Final = 3
BLOCK: Final = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME: Final = re.compile(r"# ([\w-]+\.(?:py|yaml))\n")
HEADING: Final = re.compile(r"^#+ (.*)$", re.MULTILINE)
WITHIN: Final = re.compile(r"\]\(#([\w-]+)\)")
EXTRA: Final = re.compile(r"meshloom\[(\w+)\]")


def blocks(language: str) -> list[str]:
    return [
        text
        for page in PAGES
        for kind, text in BLOCK.findall(page.read_text(encoding="utf-8"))
        if kind == language
    ]


def named(language: str) -> dict[str, str]:
    found = {match[1]: text for text in blocks(language) if (match := NAME.match(text))}
    assert found
    return found


def loaded(text: str) -> dict[str, Any]:
    spec: dict[str, Any] = YAML(typ="safe", pure=True).load(text)
    return spec


WHOLE: Final = {name: loaded(text) for name, text in named("yaml").items()}
PARTS: Final = [loaded(text) for text in blocks("yaml") if not NAME.match(text)]
COMMANDS: Final = [line for text in blocks("sh") for line in text.splitlines()]


def put_over(part: dict[str, Any]) -> dict[str, Any]:
    """The first spec of all with ``part`` in it."""
    base = next(iter(WHOLE.values()))
    return {**base, **part, "train": {**base["train"], **part.get("train", {})}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one has who saved all files of the pages."""
    folder = tmp_path_factory.mktemp("page")
    for name, text in {**named("python"), **named("yaml")}.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def importing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within a test the pages' modules can be imported; later they are unknown again."""
    monkeypatch.syspath_prepend(folder)
    yield
    for name in named("python"):
        sys.modules.pop(name.removesuffix(".py"), None)


def test_every_snippet_of_python_names_its_file() -> None:
    assert len(named("python")) == len(blocks("python"))


@pytest.mark.usefixtures("importing")
@pytest.mark.parametrize("name", [name for name in named("python") if name.startswith("with_")])
def test_what_the_page_imports_of_other_libraries_is_there(name: str, folder: Path) -> None:
    library = name.removeprefix("with_").removesuffix(".py")
    package = {"trainer": "transformers"}.get(library, library)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert callable(runpy.run_path(str(folder / name))["train"])


@pytest.mark.usefixtures("importing")
@pytest.mark.parametrize("given", [*WHOLE.values(), *map(put_over, PARTS)], ids=repr)
def test_every_spec_is_valid_and_its_factories_take_their_arguments(given: dict[str, Any]) -> None:
    spec = JobSpec.model_validate(given)
    if spec.entrypoint is not None:
        return
    called_with: dict[str, tuple[object, ...]] = {"optimizer": ([],)}
    for field in ("trainable", "model", "data", "optimizer", "schedule"):
        if (factory := getattr(spec, field)) is not None:
            offered = {"steps": spec.train.steps, "seed": spec.train.seed}
            registry.bound(field, factory, *called_with.get(field, ()), offered=offered)
    registry.chosen_loss(spec)
    if spec.data is not None and ":" in spec.data.factory:
        feed = feed_of(registry.create("data", spec.data), Share(4, 0, 1), spec.train.seed)
        assert rows(feed.share(1)) == 4
        feed.close()


@pytest.mark.ranks
@pytest.mark.parametrize("name", WHOLE)
def test_every_whole_job_of_the_pages_trains(name: str, folder: Path, tmp_path: Path) -> None:
    given = WHOLE[name]
    if "entrypoint" in given:
        changed = {"entrypoint": {**given["entrypoint"], "args": ["--steps", str(STEPS)]}}
    else:
        checkpoint = {"every_steps": STEPS}
        schedule = {"factory": "constant"}
        train = {**given["train"], "steps": STEPS}
        changed = {"train": train, "checkpoint": checkpoint, "schedule": schedule}
    spec = JobSpec.model_validate({**given, **changed})
    said = spec.plan["units"] if isinstance(spec.plan, dict) else ()
    units = tuple(UnitPlan(tuple(unit["modules"])) for unit in said)
    with ranks_below(tmp_path) as ranks:
        attempt = ranks.start(spec, spec.resources.ranks, units=units, code=folder).succeeded()
        reports = spec.entrypoint is None or "session" in name
        assert sorted(attempt.losses()) == (list(range(1, STEPS + 1)) if reports else [])
        if spec.entrypoint is not None and not reports:
            printed = (tmp_path / "rank-0.log").read_text()
            assert f"step {STEPS} loss" in printed
        if spec.data is not None:
            assert attempt.of_kind(0, RankEvaluated) == []


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_exists_with_its_options(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    program, *words = shlex.split(line, comments=True)
    match program:
        case "meshloom":
            command: Any = typer.main.get_command(app)
            context = click.Context(command, info_name="meshloom")
            while isinstance(command, click.Group):
                _, found, words = command.resolve_command(context, words)
                assert found is not None, line
                command = found
            command.make_context(command.name, words, parent=context)
            assert all(Path(word).exists() for word in words if word.endswith(".yaml"))
        case "torchrun":
            assert (folder / words[2]).exists()
        case "tensorboard":
            assert words[0] == "--logdir"
        case "make":
            assert f"\n{words[0]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
        case "source":
            assert words == [".venv/bin/activate"]
        case _:
            pytest.fail(f"{program}: no test knows how it is called")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_tests_and_extras_of_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in LINK.findall(text):
        assert (page.parent / target).exists(), target
    anchors = {
        re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in HEADING.findall(text)
    }
    assert set(WITHIN.findall(text)) <= anchors
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert {test for test in NAMED_TEST.findall(text) if f"def {test}(" not in tests} == set()
    project = (ROOT / "pyproject.toml").read_text()
    assert {extra for extra in EXTRA.findall(text) if f"\n{extra} = [" not in project} == set()
