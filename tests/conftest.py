"""What every test may ask for: a device to run on and a real Redis."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from services.local.embedded_redis import EmbeddedRedis

if TYPE_CHECKING:
    from tests.engine.gang import Gangs


WAITING = {"agent", "chaos", "dashboard", "e2e", "hosts", "local", "pools"}
# Whole stacks, browsers, other programs' clusters, minutes of training: what they show together is shown in
# parts by the others, in seconds. Files elsewhere that do so, too, are marked `system`: of whole jobs, of the
# controller's or the agent's program from its start to its end.
SYSTEM = {"chaos", "dashboard", "e2e", "hosts", "pools"}
# They take longest, these in this order: whoever began one of them last would leave others idle.
LONGEST = (
    "test_slurm_jobs.py",
    "test_ray_jobs.py",
    "test_conformance.py",
    "test_kubernetes_jobs.py",
    "test_several_hosts.py",
    "test_examples.py",
    "test_gangs_over_nodes.py",
    "test_faults.py",
    "test_example.py",
    "test_records.py",
    "test_probes.py",
    "test_rank_user.py",
    "test_stack.py",
    "test_hugging_face.py",
    "test_training.py",
    "test_plans.py",
    "test_real_trainer.py",
    "test_checkpoint_faults.py",
    "test_memory_suite.py",
    "test_short_run.py",
    "test_appearance.py",  # before those that change what it looks at
    "test_browser.py",
    "test_template.py",
    "test_sentinel.py",
    "test_loop.py",
    "test_integrations.py",
    "test_traces.py",
    "test_gang_life.py",
    "test_scripts.py",
    "test_process.py",
    "test_search.py",
    "test_checkpoints.py",
    "test_forkers.py",
    "test_agent_life.py",
    "test_elastic.py",
    "test_grid_of_four_ranks.py",
    "test_meshes.py",
    "test_command_line.py",
    "test_scale.py",
    "test_redis_wiped.py",
    "test_full_home.py",
    "test_spmd.py",
    "test_rank_states.py",
    "test_lifecycle_properties.py",
)

# On a busy machine any single example may take long; a hang ends by the test's own time-out.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=["cpu", "cuda"], help="where ranks compute")
    parser.addoption(
        "--grid",
        default="pairwise",
        choices=["pairwise", "full"],
        help="which cells of the engine's grid run: those in which every two features meet, "
        "or also every feature alone in every setting",
    )
    parser.addoption(
        "--images", metavar="FOLDER", help="also build container images there, and run them"
    )
    parser.addoption(
        "--kubernetes",
        metavar="FOLDER",
        help="also build Kubernetes's control plane there, and run pools on it",
    )
    parser.addoption(
        "--suite",
        default="all",
        choices=["parts", "system", "all"],
        help="which tests run: those of parts, those of the whole system (the folders "
        f"{', '.join(sorted(SYSTEM))} and what is marked `system`), or all",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what needs an accelerator, or builds images or Kubernetes, unless the run is to."""
    left_out = {"gpu"} if config.getoption("--device") == "cpu" else set()
    left_out |= {name for name in ("images", "kubernetes") if config.getoption(f"--{name}") is None}
    if left_out:
        without = [item for item in items if any(map(item.get_closest_marker, left_out))]
        items[:] = [item for item in items if item not in without]
        config.hook.pytest_deselected(items=without)
    suite = config.getoption("--suite")
    if suite != "all":
        others = [item for item in items if _is_system(item) != (suite == "system")]
        items[:] = [item for item in items if item not in set(others)]
        config.hook.pytest_deselected(items=others)
    items[:] = _mixed(items)


def _is_system(item: pytest.Item) -> bool:
    (folder, *_) = item.path.relative_to(Path(__file__).parent).parts
    return folder in SYSTEM or item.get_closest_marker("system") is not None


def _mixed(items: list[pytest.Item]) -> list[pytest.Item]:
    """Long files first; those that wait for processes spread among those that compute."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    kinds: dict[bool, list[Path]] = {True: [], False: []}
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    for path in sorted(files, key=lambda path: ranks.get(path.name, len(LONGEST))):
        kinds[path.parent.name in WAITING].append(path)
    places = {
        path: (place + 0.5) / len(paths)
        for paths in kinds.values()
        for place, path in enumerate(paths)
    }
    return [item for path in sorted(files, key=places.__getitem__) for item in files[path]]


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def gangs(device: str) -> Iterator[Gangs]:
    """Rank processes for the engine's tests: `gangs(world)` is the gang of that world size."""
    from tests.engine.gang import Gangs  # noqa: PLC0415 - loads torch, which most tests do without

    gangs = Gangs(device)
    yield gangs
    gangs.close()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """One real server for the session; tests that kill a server start their own."""
    with (
        tempfile.TemporaryDirectory(prefix="meshloom-redis-") as folder,
        EmbeddedRedis.start(Path(folder)) as server,
    ):
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """The URL of an empty Redis database."""
    redis_server.flush()
    return redis_server.url
