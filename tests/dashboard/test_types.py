"""The dashboard's TypeScript types say what the REST views say, field by field."""

import re
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter

from services.contract.api import plan_views, views
from services.contract.jobs import traces
from services.contract.words.problems import Problem

_TYPES: Final = Path(__file__).parents[2] / "services/controller/dashboard/src/api/types.ts"
_READ: Final[tuple[type[BaseModel], ...]] = (
    views.JobPage,
    views.RankList,
    views.DiagnosisView,
    views.EventPage,
    views.LogPage,
    views.MetricsView,
    views.CheckpointList,
    traces.TraceList,
    views.AttemptList,
    views.NodeList,
    plan_views.PlanList,
    plan_views.PlanView,
    views.StopRequest,
    views.ResumeRequest,
    Problem,
)

_ANY_JSON: Final = "JsonValue"

Schema = dict[str, Any]
Alternatives = frozenset[str]


def _schemas() -> dict[str, Schema]:
    """The JSON schema of every model that travels, by name."""
    found: dict[str, Schema] = {}
    for model in _READ:
        schema = TypeAdapter(model).json_schema(mode="serialization")
        found |= schema.pop("$defs", {})
        found[model.__name__] = schema
    return {name: schema for name, schema in found.items() if name != _ANY_JSON}


def _typescript(schema: Schema) -> Alternatives:
    """The alternatives of the TypeScript type of values that follow ``schema``."""
    if "anyOf" in schema:
        return frozenset[str]().union(*(_typescript(option) for option in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return frozenset(f'"{value}"' for value in schema.get("enum", [schema.get("const")]))
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", maxsplit=1)[-1]
        return frozenset({"unknown" if name == _ANY_JSON else name})
    return frozenset({_plain(schema)})


def _plain(schema: Schema) -> str:
    match schema.get("type"):
        case "integer" | "number":
            return "number"
        case "array":
            (item,) = _typescript(schema["items"])
            return f"{item}[]"
        case "object":
            values = schema.get("additionalProperties", True)
            for pattern in schema.get("patternProperties", {}).values():
                values = pattern
            found = sorted(_typescript(values), reverse=True) if isinstance(values, dict) else []
            return f"Record<string, {' | '.join(found) or 'unknown'}>"
        case "string" | "boolean" | "null" as name:
            return str(name)
    return "unknown"


def _split(text: str) -> Alternatives:
    # Not within Record<string, number | null>.
    parts = re.split(r"\|(?![^<]*>)", text)
    return frozenset(part.strip() for part in parts if part.strip())


def _interfaces() -> dict[str, dict[str, Alternatives]]:
    blocks = re.findall(
        r"^export interface (\w+) \{\n(.*?)^\}", _source(), re.MULTILINE | re.DOTALL
    )
    return {
        name: {
            field: _split(kind)
            for field, kind in re.findall(r"^  (\w+): (.+);$", body, re.MULTILINE)
        }
        for name, body in blocks
    }


def _aliases() -> dict[str, Alternatives]:
    found = re.findall(r"^export type (\w+) =(.*?);$", _source(), re.MULTILINE | re.DOTALL)
    return {name: _split(text) for name, text in found}


def _source() -> str:
    return _TYPES.read_text(encoding="utf-8")


def test_each_view_has_the_same_fields_of_the_same_types_in_typescript_and_none_is_left_over() -> (
    None
):
    schemas = _schemas()
    assert len(schemas) > len(_READ)
    aliases = {name: _typescript(s) for name, s in schemas.items() if "enum" in s}
    assert _aliases() == aliases
    assert _interfaces() == {
        name: {field: _typescript(kind) for field, kind in schema["properties"].items()}
        for name, schema in schemas.items()
        if name not in aliases
    }
