"""``meshloom init`` writes a spec that is valid, commented, and about the script that was named."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from services.cli.app import app
from services.cli.errors import CliError
from services.cli.spec_file import read_spec
from services.contract.jobs.specs import JobSpec

TORCHRUN = Path("examples/script/train.py")
WITH_SESSION = Path("examples/script/train_with_session.py")


def _init(*words: object, said: str = "") -> Result:
    return CliRunner().invoke(app, ["init", *map(str, words)], input=said)


def test_the_defaults_are_a_valid_commented_job(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    done = _init(path, "--yes")
    assert done.exit_code == 0, done.output
    spec = JobSpec.model_validate(read_spec(path))
    assert (spec.resources.ranks, spec.train.steps) == (2, 1000)
    assert f"meshloom submit {path}" in path.read_text()
    assert path.read_text().count("#") > 5


def test_answers_are_what_stands_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    answers = ["mine", "my_model:Net", "my_data:pictures", "cross_entropy", "4", "300", "64"]
    done = _init(path, said="\n".join(answers) + "\n")
    assert done.exit_code == 0, done.output
    spec = JobSpec.model_validate(read_spec(path))
    assert spec.model is not None
    assert spec.data is not None
    assert spec.loss is not None
    assert (spec.name, spec.model.factory, spec.data.factory) == (
        *("mine", "my_model:Net", "my_data:pictures"),
    )
    assert (spec.loss.factory, spec.resources.ranks, spec.train.steps) == ("cross_entropy", 4, 300)
    assert (spec.train.global_batch, spec.checkpoint.every_steps) == (64, 30)


@pytest.mark.parametrize(("script", "has_session"), [(TORCHRUN, False), (WITH_SESSION, True)])
def test_a_script_is_a_job_as_it_is(tmp_path: Path, script: Path, has_session: bool) -> None:  # noqa: FBT001 a case
    path = tmp_path / "job.yaml"
    done = _init(path, "--from-script", script, "--ranks", 4)
    assert done.exit_code == 0, done.output
    spec = JobSpec.model_validate(read_spec(path))
    assert spec.entrypoint is not None
    assert (spec.entrypoint.script, spec.resources.ranks) == (script.name, 4)
    text = path.read_text()
    assert "--steps" in text
    assert ("nothing is checkpointed" in text) is not has_session
    assert f"--code {script.parent}" in done.stdout


def test_a_trainable_in_the_script_is_what_trains(tmp_path: Path) -> None:
    script = tmp_path / "pair.py"
    script.write_text("import meshloom\nclass Pair(meshloom.Trainable):\n    pass\n")
    done = _init(tmp_path / "job.yaml", "--from-script", script)
    assert done.exit_code == 0, done.output
    spec = JobSpec.model_validate(read_spec(tmp_path / "job.yaml"))
    assert spec.trainable is not None
    assert spec.trainable.factory == "pair:Pair"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("train.py", "def (", "is no Python"),
        ("train.py", f"x{'.y' * 5_000}", "is no Python"),
        ("train.py", f"x = {'-' * 50_000}1", "is no Python"),
        ("train me.py", "", "/entrypoint/script"),
        ("gone.py", None, "cannot read"),
    ],
)
def test_what_is_no_script_leaves_no_file(
    tmp_path: Path, name: str, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    refused = _init(tmp_path / "job.yaml", "--from-script", tmp_path / name, "--name", "a")
    assert isinstance(refused.exception, CliError)
    assert words in str(refused.exception)
    assert not (tmp_path / "job.yaml").exists()


def test_a_file_that_is_there_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("mine")
    assert "there already" in str(_init(path, "--yes").exception)
    assert path.read_text() == "mine"
    assert _init(path, "--yes", "--force").exit_code == 0
    assert path.read_text() != "mine"


@pytest.mark.parametrize("name", ["yes", "a: b", "#x", "1e3"])
def test_a_name_that_yaml_would_read_otherwise_is_quoted_or_refused(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "job.yaml"
    done = _init(path, "--yes", "--name", name)
    if done.exit_code == 0:
        assert read_spec(path)["name"] == name
    else:
        assert "/name" in str(done.exception)
        assert not path.exists()
