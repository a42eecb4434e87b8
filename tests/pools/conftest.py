"""What tests of pools need beside this project."""

from pathlib import Path

import pytest

from tests.pools import kube_binaries


@pytest.fixture(scope="session")
def kube_programs(request: pytest.FixtureRequest) -> Path:
    """The folder with Kubernetes's control plane, as ``make test-kubernetes`` has built it."""
    programs = Path(str(request.config.getoption("--kubernetes"))).absolute() / "bin"
    if not programs.is_dir():
        pytest.skip(kube_binaries.why_not_here() or f"{programs} was not built")
    return programs
