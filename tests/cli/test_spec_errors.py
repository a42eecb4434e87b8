"""A refused spec: each fault once, with line and column, and in plain words."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, Field
from ruamel.yaml import YAML

from services.cli.errors import CliError, RefusedError, SpecRefusedError
from services.cli.request_bodies import read_model
from services.cli.spec_file import faults_in, judged, read_text
from services.contract.words.problems import Problem
from services.local.settings import child_environment
from tests.e2e.conftest import free_port

BAD = """\
name: my job          # a blank is not allowed
models: {factory: decodr}
model: {factory: decodr}
data: {factory: stdlib_bytes}
train:
  steps: 0
  global_batch: 7
optimizer:
  factory: adamw
  args: {lr: fast}
resources: {ranks: 2}
labels: {team: [a]}
"""


def _refused(path: Path) -> str:
    source = read_text(path)
    faults = faults_in(source.spec)
    problem = Problem(
        type="x", title="x", status=422, code="x", detail="; ".join(f.detail for f in faults), errors=tuple(faults)
    )  # fmt: skip
    with pytest.raises(SpecRefusedError) as refused, judged(source):
        raise RefusedError(problem)
    return str(refused.value)


def test_every_fault_is_told_once_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(BAD)
    first, *lines = _refused(path).splitlines()
    assert first == f"{path} is not a valid spec: {len(lines)} errors"
    for start in (
        "  line 1, column 1, /name: must be 1 to 63 letters",
        "  line 2, column 1, /models: there is no field 'models' here; did you mean 'model'?",
        "  line 3, column 9, /model/factory: there is no built-in 'decodr'; did you mean 'decoder'?",
        "  line 6, column 3, /train/steps: must be at least 1, not 0",
        "  line 7, column 3, /train/global_batch: 7 does not divide by the 2 data-parallel ranks",
        "  line 10, column 10, /optimizer/args/lr: must be a number, not 'fast'",
        "  line 12, column 10, /labels/team: must be a text, not a list",
    ):
        assert sum(line.startswith(start) for line in lines) == 1, (start, lines)
    assert len(lines) == 7
    places = [int(line.split()[1].rstrip(",")) for line in lines]
    assert places == sorted(places)
    for raw in ("Input should", "String should", "Extra inputs", "pattern", "^["):
        assert raw not in _refused(path)


def test_a_missing_field_is_at_what_should_have_it(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("model: {factory: decoder}\ndata: {factory: stdlib_bytes}\ntrain: {}\n")
    assert "  line 3, column 1, /train/steps: this field is required" in _refused(path)


def test_who_writes_the_command_of_a_script_is_told_the_entry_point(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: mine\ncommand: [python, train.py]\nresources: {ranks: 2}\n")
    assert (
        "  line 2, column 1, /command: there is no field 'command' here; a script of yours is "
        "`entrypoint: {script: train.py, args: []}`"
    ) in _refused(path).splitlines()


@pytest.mark.parametrize("text", ["a: &x {b: 1}\nc: *x", "a: 1\n<<: {c: 2}"])
def test_what_the_file_does_not_say_has_no_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    source = read_text(path)
    assert source.mark("/code") is None
    assert source.mark("") is None


def test_a_file_is_composed_once_for_the_lines_of_all_its_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("\n".join(f"key{n}: 1" for n in range(100)))
    composed, compose = [], YAML.compose

    def counted(yaml: YAML, stream: str) -> object:
        composed.append(stream)
        return compose(yaml, stream)

    monkeypatch.setattr(YAML, "compose", counted)
    told = _refused(path)
    assert all(f"  line {n + 1}, column 1, /key{n}: " in told for n in range(90))
    assert len(composed) == 1


class _Wanted(BaseModel):
    count: int = Field(ge=1)


def test_an_option_that_makes_no_request_is_one_line() -> None:
    with pytest.raises(CliError) as refused:
        read_model(_Wanted, {"count": 0})
    assert str(refused.value) == "/count: must be at least 1, not 0"


def test_an_anchor_that_is_given_again_is_no_warning_with_lines_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: &n a\nlabels: {team: &n b, also: *n}  # \u202emoolhsem\n")
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "submit", path],
        capture_output=True,
        check=False,
        text=True,
        env=child_environment(MESHLOOM_URL=f"http://127.0.0.1:{free_port()}"),
    )
    assert done.returncode == 2
    assert done.stderr.startswith("meshloom: no controller answers")
    assert done.stderr.count("\n") == 1
