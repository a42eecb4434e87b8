"""``meshloom init``: a job spec to begin with, from questions or from a script."""

import ast
import json
import re
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer

from services.cli.errors import CliError
from services.cli.output import answers, as_data
from services.cli.spec_file import faults_in, spec_of
from services.cli.terminal import console

_HEAD: Final = """\
# A job of Meshloom.
#   meshloom plan {file} --code {code}       predicts mesh, memory and step time
#   meshloom submit {file} --code {code} -f  runs it, and watches it
"""
_SCRIPT_HEAD: Final = """\
# A job of Meshloom: a script with a loop of its own.
#   meshloom submit {file} --code {code} -f  runs it, and watches it
"""
_SCRIPT: Final = """\
name: {name}

# Runs in each rank as torchrun would run it. The path is below the folder of --code.
entrypoint:
  script: {script}
  args: []{options}
{session}
resources:
  ranks: {ranks}          # processes; on a GPU node one GPU each
  # device: auto    # or cpu, cuda

# labels: {{team: vision}}
# priority: 0       # higher starts first
"""
_SESSION: Final = """\

# The script reports to meshloom.session, so it can be paused and resumed.
checkpoint:
  keep_last: 2      # committed checkpoints that are kept
"""
_NO_SESSION: Final = """\

# The script does not use meshloom.session: it runs, but nothing is checkpointed, and a pause loses its steps.
# docs/your-own-training.md shows the three lines that change this.
"""
_LOOP: Final = """\
name: {name}

# {what}
{parts}

train:
  steps: {steps}
  global_batch: {batch}    # samples a step, over all ranks
  # eval_every: 100    # steps between two validations; 0: only after the last step
  # precision: {{params: bf16}}

# optimizer: {{factory: adamw, args: {{lr: 3.0e-4}}}}
# schedule: {{factory: warmup_cosine, args: {{warmup_steps: 100}}}}

resources:
  ranks: {ranks}          # processes; or world: {{min: 2, max: 8}} for an elastic job
  # device: auto    # or cpu, cuda

checkpoint:
  every_steps: {every}
  keep_last: 2      # committed checkpoints that are kept

# faults: {{max_restarts: 3}}
# labels: {{team: vision}}
# priority: 0       # higher starts first
"""
_NAMED: Final = "Each is a built-in, or MODULE:CALLABLE of your code."


class _Script(NamedTuple):
    """What is seen of a script without running it."""

    options: tuple[str, ...]
    trainables: tuple[str, ...]
    uses_session: bool


@answers
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")] = Path(
        "job.yaml"
    ),
    *,
    from_script: Annotated[
        Path | None,
        typer.Option(metavar="SCRIPT", help="Make a job of this training script (Python)."),
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="The job's name.")] = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="How many ranks.", min=1, max=65_536)
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nothing: take the defaults.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
) -> None:
    """Write a commented job spec to begin with.

    It asks for the model, the data and sizes; of a script it needs to know nothing. The script is read, not run.

    Examples:
      meshloom init

      meshloom init job.yaml --from-script train.py --ranks 4
    """
    if file.exists() and not force:
        raise CliError(f"{file} is there already; choose another name, or say --force")
    if from_script is not None:
        text = _of_script(from_script, file, name, ranks or 2)
    else:
        text = _of_answers(_Questions(ask=not yes), file, name, ranks)
    spec = spec_of(text, str(file))
    faults = faults_in(spec)
    if faults:
        listed = "".join(f"\n  {fault.pointer}: {fault.detail}" for fault in faults)
        raise CliError(f"this would not be a valid spec; nothing was written{listed}")
    try:
        file.write_text(text)
    except OSError as error:
        raise CliError(f"cannot write {file}: {error.strerror}") from error
    if not as_data({"file": str(file), "spec": spec}):
        code = from_script.parent if from_script else "."
        console.print(f"wrote {file}; `meshloom submit {file} --code {code} -f` runs it")


class _Questions:
    """Asks a person, or takes the defaults."""

    def __init__(self, *, ask: bool) -> None:
        self._ask = ask

    def text(self, question: str, default: str) -> str:
        return str(typer.prompt(question, default=default)) if self._ask else default

    def number(self, question: str, default: int) -> int:
        return int(typer.prompt(question, default=default, type=int)) if self._ask else default


def _of_answers(ask: _Questions, file: Path, name: str | None, ranks: int | None) -> str:
    name = name or ask.text("name of the job", "my-model")
    model = ask.text("model: decoder (built in), or MODULE:CALLABLE of yours", "decoder")
    data = ask.text("data: stdlib_bytes (built in), or MODULE:CALLABLE of yours", "stdlib_bytes")
    loss = ask.text("loss: next_token, cross_entropy, mse, bce_with_logits or yours", "next_token")
    ranks = ranks or ask.number("ranks", 2)
    steps = ask.number("steps", 1000)
    batch = ask.number("samples a step, over all ranks", 16 * ranks)
    built_in = ", args: {dim: 128, layers: 2, heads: 4}" if model == "decoder" else ""
    of_data = ", args: {seq_len: 128}" if data == "stdlib_bytes" else ""
    parts = (
        f"model: {{factory: {_scalar(model)}{built_in}}}\n"
        f"data: {{factory: {_scalar(data)}{of_data}}}\n"
        f"loss: {{factory: {_scalar(loss)}}}"
    )
    body = _LOOP.format(
        name=_scalar(name),
        what=_NAMED,
        parts=parts,
        steps=steps,
        batch=batch,
        ranks=ranks,
        every=max(steps // 10, 1),
    )
    return _HEAD.format(file=file, code=".") + body


def _of_script(script: Path, file: Path, name: str | None, ranks: int) -> str:
    seen = _seen(script)
    name = name or script.stem.replace("_", "-").strip("-.") or "script"
    if seen.trainables:
        body = _LOOP.format(
            name=_scalar(name),
            what=f"A meshloom.Trainable in {script.name}, which the folder of --code has.",
            parts=f"trainable: {{factory: {_scalar(f'{script.stem}:{seen.trainables[0]}')}}}",
            steps=1000,
            batch=16 * ranks,
            ranks=ranks,
            every=100,
        )
        return _HEAD.format(file=file, code=script.parent) + body
    options = f"          # its options: {' '.join(seen.options)}" if seen.options else ""
    return _SCRIPT_HEAD.format(file=file, code=script.parent) + _SCRIPT.format(
        name=_scalar(name),
        script=_scalar(script.name),
        options=options,
        session=_SESSION if seen.uses_session else _NO_SESSION,
        ranks=ranks,
    )


def _seen(script: Path) -> _Script:
    try:
        tree = ast.parse(script.read_bytes(), str(script))
    except OSError as error:
        raise CliError(f"cannot read {script}: {error.strerror}") from error
    # Python runs no script either that is nested so deep that it cannot be parsed.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CliError(f"{script} is no Python: {str(error) or 'nested too deep'}") from error
    nodes = list(ast.walk(tree))
    calls = (node for node in nodes if isinstance(node, ast.Call))
    options = (
        first.value
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
        for first in call.args[:1]
        if isinstance(first, ast.Constant) and isinstance(first.value, str)
    )
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    trainables = (
        each.name
        for each in classes
        if any(ast.unparse(base) in {"Trainable", "meshloom.Trainable"} for base in each.bases)
    )
    # Not in a comment: what stands there is one line.
    printable = tuple(each for each in options if each.isprintable())
    return _Script(printable, tuple(trainables), _imports_session(nodes))


def _imports_session(nodes: list[ast.AST]) -> bool:
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "meshloom":
            if any(each.name == "session" for each in node.names):
                return True
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "meshloom.session":
            return True
    return False


def _scalar(text: str) -> str:
    """A text as YAML: plain where nothing in it could mean something else."""
    plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9_./:-]*", text) and ":" not in text[-1:]
    reserved = text.lower() in {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}
    return text if plain and not reserved else json.dumps(text)
