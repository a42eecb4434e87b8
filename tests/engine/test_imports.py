"""What importing the engine does not import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_core

PACKAGE = Path(fsdp_core.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
)
# It subclasses a stage of torch.distributed.pipelining, which imports the reference by itself.
BRIDGE = "fsdp_core.interop.pipelining"
ARITHMETIC = [
    name
    for name in MODULES
    if name.startswith(("fsdp_core.layout", "fsdp_core.schedule", "fsdp_core.plan.model"))
]


def modules_after(*imports: str) -> set[str]:
    code = "".join(f"import {name}\n" for name in imports) + "import sys\nprint(*sys.modules)"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=PACKAGE.parent, timeout=60
    )
    return set(done.stdout.split())


def test_arithmetic_and_plans_import_no_torch() -> None:
    assert {"fsdp_core.layout", "fsdp_core.schedule", "fsdp_core.plan.model"} <= set(ARITHMETIC)
    assert not any(name.split(".")[0] == "torch" for name in modules_after(*ARITHMETIC))


def test_the_whole_engine_never_imports_the_reference() -> None:
    engine = [name for name in MODULES if name != BRIDGE]
    loaded = modules_after("torch", "torch.optim", "torch.utils.checkpoint", *engine)
    assert set(MODULES) - {BRIDGE} == set(MODULES) & loaded
    assert not any(name.startswith("torch.distributed.fsdp") for name in loaded)
    assert "torch._dynamo" not in loaded  # it would import the reference, and takes a second


def test_no_module_names_the_reference_in_an_import() -> None:
    """Not even within a function, where importing the module would not show it."""
    sources = list(PACKAGE.rglob("*.py"))
    assert len(sources) == len(MODULES)
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{line} imports {name}"
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        for line, name in imported(node)
        if name.startswith("torch.distributed.fsdp")
    ]
    assert found == []


def imported(node: ast.AST) -> list[tuple[int, str]]:
    """The names that a statement imports, with its line."""
    match node:
        case ast.Import(names=names, lineno=line):
            return [(line, alias.name) for alias in names]
        case ast.ImportFrom(module=module, names=names, lineno=line):
            return [(line, f"{module}.{alias.name}") for alias in names]
    return []


def test_every_public_name_is_there() -> None:
    for name in fsdp_core.__all__:
        assert getattr(fsdp_core, name) is not None
        assert name in dir(fsdp_core)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = fsdp_core.absent
