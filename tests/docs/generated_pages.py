"""The reference pages made from the code: job spec, settings, REST API, lifecycle, command line.

``python -m tests.docs.generated_pages`` writes them. Readers then see each field as it is declared,
and ``test_generated_pages.py`` fails when a page is older than the code.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from meshloom.client.settings import ClientSettings
from services.cli.settings import CliSettings
from services.contract.jobs.specs import JobSpec
from services.controller.domain.job.lifecycle_page import lifecycle_page
from services.controller.settings import Settings
from services.local.settings import LocalSettings
from services.worker.agent.settings import AgentSettings
from tests.docs.command_line_page import command_line_page

DOCS: Final = Path(__file__).parents[2] / "docs"
_OPENAPI: Final = Path(__file__).parents[1] / "controller/openapi.json"
_MADE: Final = "<!-- Made by `python -m tests.docs.generated_pages` from {}. -->\n"
READERS: Final[tuple[tuple[str, type[BaseModel]], ...]] = (
    ("controller", Settings),
    ("agent", AgentSettings),
    ("command line", ClientSettings),
    ("command line", CliSettings),
    ("Python client", ClientSettings),
    ("local stack", LocalSettings),
)
# They depend on the machine, so a page that showed their value would differ from one to the next.
_COMPUTED_DEFAULTS: Final = {"node_id": "from the host's name", "cpu_slots": "cores, at least 2"}


def configuration_page() -> str:
    """Every environment variable: who reads it, what it sets, its default."""
    rows: dict[str, tuple[list[str], str, str]] = {}
    for reader, settings in READERS:
        for name, field in settings.model_fields.items():
            default = _COMPUTED_DEFAULTS.get(name) or _default(field.default)
            text = field.description or ""
            readers, *_ = rows.setdefault(f"MESHLOOM_{name.upper()}", ([], text, default))
            readers.append(reader)
    lines = [
        "# Configuration",
        "",
        _MADE.format("the settings classes"),
        "Each process reads these environment variables when it starts.",
        "",
        "| variable | read by | meaning | default |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| `{name}` | {', '.join(readers)} | {_cell(text)} | {default} |"
        for name, (readers, text, default) in sorted(rows.items())
    ]
    lines += [
        "",
        (
            "What a job may import from `MESHLOOM_USER_PATH`, and what from elsewhere: "
            "[your own training](your-own-training.md#your-code). Who may name which entry points, and "
            "where secrets lie: [security](security.md)."
        ),
    ]
    return "\n".join(lines) + "\n"


def spec_page() -> str:
    """Every field of a job spec: its type, default, bounds and meaning."""
    schema = JobSpec.model_json_schema()
    parts = dict(_parts_in_order(schema))
    lines = [
        "# Job spec",
        "",
        _MADE.format("the models of `services/contract/jobs`"),
        (
            "YAML for people, the same as JSON over REST. Unknown fields are refused. "
            "`meshloom init` writes a spec to begin with; "
            "[your own training](../your-own-training.md) explains models, data and scripts."
        ),
    ]
    for title, part in {"JobSpec": schema, **parts}.items():
        head = "The job" if title == "JobSpec" else f"`{title}`"
        about = str(part.get("description", "")).split("\n\n")[0].replace("\n", " ")
        lines += ["", f"## {head}", "", _plain(about), ""]
        lines += ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
        # A script may leave out what others must give, so the schema of a job requires nothing.
        required = set(part.get("required", ["train"] if title == "JobSpec" else ()))
        for name, field in part.get("properties", {}).items():
            default = "required" if name in required else _default(field.get("default", "—"))
            meaning = _cell(field.get("description", ""))
            lines.append(f"| `{name}` | {_type(field)} | {default} | {meaning} |")
        if isinstance(part.get("additionalProperties"), dict):
            lines.append("| any other | any JSON value | — | an option of the optimizer |")
    return "\n".join(lines) + "\n"


def rest_page() -> str:
    """Every endpoint of the REST API, by tag."""
    paths = json.loads(_OPENAPI.read_text(encoding="utf-8"))["paths"]
    by_tag: dict[str, list[str]] = {}
    for path, methods in sorted(paths.items()):
        for method, operation in methods.items():
            about = operation.get("description") or operation.get("summary", "")
            about = about.split("\n\n")[0].replace("\n", " ")
            asks = [p["name"] for p in operation.get("parameters", ()) if p["in"] == "query"]
            query = ", ".join(f"`{name}`" for name in asks) or "—"
            row = f"| `{method.upper()} {path}` | {_cell(_plain(about))} | {query} |"
            by_tag.setdefault(operation.get("tags", ["other"])[0], []).append(row)
    lines = [
        "# REST API",
        "",
        _MADE.format("the API's OpenAPI description"),
        (
            "The running controller serves the whole description, with every field of requests and "
            "answers, at `/v1/openapi.json`. `MESHLOOM_TOKEN` travels as `Authorization: Bearer`. "
            "Errors are `application/problem+json` ([RFC 9457](https://www.rfc-editor.org/rfc/rfc9457)): "
            "`title`, `detail`, and for a spec every fault with its JSON pointer."
        ),
    ]
    for tag, rows in sorted(by_tag.items()):
        lines += ["", f"## {tag.capitalize()}", ""]
        lines += ["| request | what it does | query |", "| --- | --- | --- |", *rows]
    return "\n".join(lines) + "\n"


PAGES: Final[Mapping[Path, Callable[[], str]]] = {
    DOCS / "configuration.md": configuration_page,
    DOCS / "lifecycle.md": lifecycle_page,
    DOCS / "reference/command-line.md": command_line_page,
    DOCS / "reference/job-spec.md": spec_page,
    DOCS / "reference/rest-api.md": rest_page,
}


def _parts_in_order(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The parts of a schema that have fields, in the order in which a reader meets them."""
    parts, seen, ahead = schema["$defs"], set[str](), [schema]
    while ahead:
        for name in _named(ahead.pop(0).get("properties", {})):
            if name not in seen and "properties" in parts[name]:
                seen.add(name)
                ahead.append(parts[name])
                yield name, parts[name]


def _named(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(named := value.get("$ref"), str):
            yield named.rpartition("/")[2]
        for inner in value.values():
            yield from _named(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _named(inner)


def _type(field: Mapping[str, Any]) -> str:
    match field:
        case {"$ref": str(place)}:
            name = place.rpartition("/")[2]
            said = "any JSON value" if name == "JsonValue" else f"[{name}](#{name.lower()})"
        case {"anyOf": [*choices]}:
            said = " or ".join(map(_type, choices))
        case {"const": only}:
            said = f"`{only}`"
        case {"enum": [*choices]}:
            said = " or ".join(f"`{one}`" for one in choices)
        case {"type": "array"}:
            said = f"list of {_type(field.get('items', {}))}"
        case {"type": "object", "additionalProperties": inner} if inner not in (True, False, {}):
            said = f"mapping to {_type(inner)}"
        case {"type": "object"}:
            said = "mapping"
        case _:
            said = f"{field.get('type', 'any JSON value')}{_bounds(field)}"
    return said


def _bounds(field: Mapping[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    said = [f"{sign} {field[name]:,}" for name, sign in signs.items() if name in field]
    return f" {', '.join(said)}" if said else ""


def _default(value: object) -> str:
    if value == "—":
        return "—"
    if value is None or value == Path():
        return "none"
    if isinstance(value, Path):
        return f"`{value}`"
    if isinstance(value, tuple | frozenset | list) and all(item == Path() for item in value):
        return "the current folder" if value else "none"
    if isinstance(value, Mapping):
        value = {name: inner for name, inner in value.items() if inner not in (None, {}, [])}
    if repr(value) == "PydanticUndefined":
        return "required"
    return f"`{json.dumps(value)}`" if not isinstance(value, str) else f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _plain(text: str) -> str:
    return text.replace("``", "`")


if __name__ == "__main__":
    for page, made in PAGES.items():
        page.parent.mkdir(exist_ok=True)
        page.write_text(made(), encoding="utf-8")
