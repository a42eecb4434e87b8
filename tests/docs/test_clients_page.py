"""The page on the Python client names what there is, and its code is Python."""

import ast
import re
from pathlib import Path

from meshloom.client import AsyncJob, Client, Job

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()


def test_each_call_of_the_page_is_a_method() -> None:
    with Client("http://127.0.0.1:1") as client:
        for name in re.findall(r"`client\.([a-z_.]+)", PAGE):
            found: object = client
            for part in name.split("."):
                found = getattr(found, part)
    named = set(re.findall(r"\bjob\.([a-z_]+)\(", PAGE))
    assert len(named) >= 15
    assert [name for name in named if not hasattr(Job, name) or not hasattr(AsyncJob, name)] == []


def test_each_public_method_of_a_job_is_on_the_page() -> None:
    public = {name for name in vars(Job) if not name.startswith("_")}
    told = set(re.findall(r"\.([a-z_]+)", PAGE))
    assert public - told <= {"id", "name", "reason", "has_ended"}


def test_the_code_of_the_page_compiles() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert blocks
    for block in blocks:
        ast.parse(block)
