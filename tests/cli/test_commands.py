"""The tree of commands: what each one offers, and what it costs to list them."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli import output
from services.cli.app import COMMANDS, app
from services.cli.errors import UnreachableError
from services.contract.api.views import StopRequest
from services.local.settings import child_environment
from tests.cli.tree import leaves
from tests.e2e.conftest import free_port

LEAVES = list(leaves())
PANELS = ["Jobs", "Checkpoints", "Plans", "Cluster", "Admin"]
HEAVY = ["httpx", "pydantic", "pydantic_settings", "ruamel", "tenacity", "humanize", "pathspec", "tokenizers", "torch"]  # fmt: skip


def _ids() -> list[str]:
    return [" ".join(leaf.words) for leaf in LEAVES]


def test_help_lists_every_command_in_its_group() -> None:
    said = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).stdout
    places = [said.index(f"─ {panel} ─") for panel in PANELS]
    assert places == sorted(places)
    for listed in COMMANDS:
        assert f"│ {listed.name} " in said
        assert listed.summary in said


def test_what_is_listed_is_the_first_line_of_a_commands_help() -> None:
    for listed in COMMANDS:
        command = next(leaf.command for leaf in LEAVES if leaf.words[0] == listed.name)
        if len(listed.name.split()) == 1 and (listed.name,) in {leaf.words for leaf in LEAVES}:
            assert inspect.cleandoc(command.help).partition("\n")[0] == listed.summary


def test_help_imports_neither_the_client_nor_what_it_needs() -> None:
    program = (
        "import sys\n"
        "sys.argv = ['meshloom', '--help']\n"
        "from services.cli.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('loaded', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.splitlines()[-1].split()[1:])
    assert "typer" in loaded
    assert not loaded & {*HEAVY, "meshloom.client", "services.cli.tables"}
    assert not {name for name in loaded if name.startswith("services.contract.") and name.count(".") > 2} - {
        "services.contract.system.own_process"
    }  # fmt: skip


def test_a_command_imports_no_more_than_it_needs_before_its_first_request() -> None:
    program = (
        "import sys\n"
        "sys.argv = ['meshloom', 'ls']\n"
        "from services.cli.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 2\n"
        "from services.contract.api.plan_views import PlanView\n"
        "assert not PlanView.__pydantic_complete__\n"
        "print('loaded', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=child_environment(MESHLOOM_URL=f"http://127.0.0.1:{free_port()}"),
    )
    loaded = set(done.stdout.splitlines()[-1].split()[1:])
    assert "meshloom.client.synchronous.rest" in loaded
    assert not loaded & {
        *("ruamel.yaml", "pathspec", "pydantic_settings", "fsdp_core.plan.model.search"),
        *("meshloom.client.asynchronous.rest", "services.contract.messages.commands"),
    }


@pytest.mark.parametrize("leaf", LEAVES, ids=_ids())
def test_a_command_has_examples_and_help_without_odd_words(leaf: object) -> None:
    words = next(each.words for each in LEAVES if each is leaf)
    said = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200"}).stdout
    assert "Example" in said
    assert f"meshloom {' '.join(words)}" in said
    for odd in ("<bool>", "<str>", "<int", "{", "{JOB}"):
        assert odd not in said.replace("{factory", "")


@pytest.mark.parametrize("leaf", LEAVES, ids=_ids())
def test_every_command_answers_programs_too(leaf: object) -> None:
    command = next(each.command for each in LEAVES if each is leaf)
    options = {option for param in command.params for option in param.opts}
    assert {"-o", "--json"} <= options


def test_a_format_that_is_none_is_refused() -> None:
    done = CliRunner().invoke(app, ["ls", "-o", "xml"], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "'table', 'wide', 'json', 'yaml'" in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["logs", "last", "--stream", "foo"], "'foo' is not one of 'stdout', 'stderr'"),
        (["patch", "last", "--keep-last", "0"], "it must be greater than or equal to 1"),
        (["patch", "last", "--keep-last", "x"], "--keep-last"),
        (["status"], "Missing argument 'JOB'"),
    ],
)
def test_an_option_that_is_wrong_is_told_in_plain_words(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert said in done.output
    for raw in ("Value error", "Input should", "type="):
        assert raw not in done.output


@pytest.mark.parametrize("name", ["pause", "cancel"])
def test_a_stop_without_options_is_the_one_of_api_and_dashboard(name: str) -> None:
    command = next(leaf.command for leaf in LEAVES if leaf.words == (name,))
    defaults = {param.name: param.default for param in command.params}
    assert (defaults["checkpoint"], defaults["grace"]) == (
        StopRequest().checkpoint,
        StopRequest().grace_s,
    )


@pytest.mark.parametrize("words", ["--version", "init --help", "submit --help"])
@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [
        (">/dev/full", 2, "meshloom: output: No space left on device\n"),
        (">&-", 0, ""),
        ("| true", 1, ""),
    ],
)
def test_output_that_cannot_be_written_is_no_traceback(
    words: str, redirection: str, code: int, said: str
) -> None:
    command = f"{sys.executable} -m services.cli {words} {redirection}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr == said
    assert done.returncode in {0, code} if redirection == "| true" else done.returncode == code


def test_the_version_is_that_of_the_package() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, "meshloom 0.1.0\n")


def test_a_typing_error_names_the_command_that_is_meant() -> None:
    done = CliRunner().invoke(app, ["statsu"])
    assert done.exit_code == 2
    assert "Did you mean 'status'" in done.output


def test_yaml_is_as_json_and_has_nothing_that_a_terminal_obeys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with output.chosen(output.Format.YAML):
        assert output.as_data({"z": "\x1b[31m\u202e", "a": ["no", 1, None, 1e-3]})
    said = capsys.readouterr().out
    assert said == 'z: "\\e[31m\\u202E"\na:\n- no\n- 1\n- null\n- 0.001\n'.replace("- no", "- no")
    assert not output.as_data({})


@pytest.mark.timeout(60)  # half of the time for which a plan that is being made is waited for
def test_a_plan_is_not_waited_for_where_no_controller_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.yaml").write_text("train: {steps: 1}")
    monkeypatch.setenv("MESHLOOM_URL", f"http://127.0.0.1:{free_port()}")
    ended = CliRunner().invoke(app, ["plan", str(tmp_path / "job.yaml")])
    assert isinstance(ended.exception, UnreachableError)
