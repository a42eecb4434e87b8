"""The API is frozen: a change to it is deliberate.

Write the present document with ``python -m tests.controller.test_openapi``.
"""

import asyncio
import hashlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

from services.controller.adapters.memory import memory_ports
from services.controller.adapters.memory.server import MemoryServer
from services.controller.api.app import create_app
from services.controller.api.context import Context
from services.controller.api.guard import AccessPolicy
from services.controller.api.monitoring import Monitor

FROZEN = Path(__file__).parent / "openapi.json"
TYPES = Path(__file__).parents[2] / "services/controller/dashboard/src/api/types.ts"


def document() -> dict[str, Any]:
    """The document of the application as it is."""
    ticks = itertools.count()
    ports = memory_ports(MemoryServer(now_ms=lambda: next(ticks)))
    context = Context(ports, Monitor(), asyncio.Event(), lambda: None)
    return create_app(context, AccessPolicy()).openapi()


def test_the_api_is_the_one_that_was_promised() -> None:
    assert document() == json.loads(FROZEN.read_text()), (
        "the OpenAPI document changed; if that is meant, run "
        "`python -m tests.controller.test_openapi` and say so in the change"
    )


def test_every_error_is_promised_as_a_problem() -> None:
    for path, operations in document()["paths"].items():
        for operation in operations.values():
            for status, answer in operation["responses"].items():
                if int(status) >= 400 and path.startswith("/v1"):
                    assert set(answer["content"]) == {"application/problem+json"}, (path, status)


def test_the_dashboards_types_are_of_this_document_and_nobody_wrote_into_them() -> None:
    head, _, body = TYPES.read_text(encoding="utf-8").partition("\n\n")
    noted = dict(re.findall(r"^// (document|types) ([0-9a-f]{64})$", head, re.MULTILINE))
    texts = {"document": FROZEN.read_text(encoding="utf-8"), "types": body}
    assert noted == {
        name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()
    }, "run `npm --prefix services/controller/dashboard run types`"


if __name__ == "__main__":
    FROZEN.write_text(json.dumps(document(), indent=1, sort_keys=True) + "\n")
