"""Paths in a spec stay below the roots that the node allows."""

from pathlib import Path
from typing import Any

import pytest

from services.contract.jobs.spec_parts import Factory
from services.contract.messages.rank_pipe import RankSeat
from services.worker.rank import registry
from services.worker.rank.data.roots import DataRoots, PathOutsideRootsError, inside


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, ...]:
    for name in ("one", "two", "outside"):
        (tmp_path / name).mkdir()
        for number in range(3):
            (tmp_path / name / f"{number}.py").write_text("pass\n" * 50, encoding="utf-8")
    return (tmp_path / "one", tmp_path / "two")


def test_paths_below_a_root_are_found(roots: tuple[Path, ...]) -> None:
    (roots[1] / "deep").mkdir()
    assert inside("deep", roots) == roots[1] / "deep"
    assert inside(roots[1] / "deep", roots) == roots[1] / "deep"
    assert inside("deep/../deep", roots) == roots[1] / "deep"
    (roots[0] / "link").symlink_to(roots[0])
    assert inside("link/link", roots) == roots[0]


@pytest.mark.parametrize("path", ["..", "../outside", "../one-more", "/", "/etc", "link", "link/x"])
def test_paths_that_lead_out_are_refused(roots: tuple[Path, ...], path: str) -> None:
    for root in roots:
        (root / "link").symlink_to(root.parent / "outside")
    (roots[0].parent / "one-more").mkdir()
    with pytest.raises(PathOutsideRootsError, match="MESHLOOM_DATA_ROOTS"):
        inside(path, roots)


def test_no_roots_let_nothing_be_read(tmp_path: Path) -> None:
    with pytest.raises(PathOutsideRootsError, match="none is set"):
        inside(tmp_path, ())


@pytest.mark.parametrize("path", ["home", "home/other/export", "link/export", "home/../home/other"])
def test_what_the_node_keeps_below_a_root_is_no_jobs_to_read(
    roots: tuple[Path, ...], path: str
) -> None:
    """The folder in which `make up` runs has the exports and the code of all jobs in it."""
    home = roots[0] / "home"
    for mine in ("mine", "other"):
        (home / mine / "export").mkdir(parents=True)
    (roots[0] / "link").symlink_to(home / "other")
    private = (roots[0] / "home",)
    with pytest.raises(PathOutsideRootsError, match="home or storage"):
        inside(path, DataRoots(roots[:1], private))
    assert inside("2.py", DataRoots(roots, private)) == roots[0] / "2.py"
    named = DataRoots((home / "mine", roots[0]), private)
    assert inside(home / "mine" / "export", named) == home / "mine" / "export", (
        "as code that it uploaded"
    )
    with pytest.raises(PathOutsideRootsError):
        inside(home / "other", named)
    # Relative to the other root, too.
    assert inside("home/mine/export", named) == home / "mine" / "export"


def test_a_job_reads_in_its_own_uploaded_code_first(roots: tuple[Path, ...]) -> None:
    fields: dict[str, Any] = {"data_roots": (str(roots[0]),), "code_folder": str(roots[1])}
    granted = registry.Grant.of(RankSeat.model_construct(secrets={}, **fields)).data_roots
    assert list(granted) == [roots[1], roots[0]]
    assert inside("0.py", granted) == roots[1] / "0.py"


def test_a_built_in_source_reads_below_its_roots_alone(roots: tuple[Path, ...]) -> None:
    grant = registry.Grant(data_roots=roots)

    def source(library: object, **more: object) -> object:
        args = {"seq_len": 4, "library": str(library), **more}
        factory = Factory.model_validate({"factory": "stdlib_bytes", "args": args})
        return registry.create("data", factory, grant=grant)

    assert source(roots[0])
    outside = roots[0].parent / "outside"
    for library in (outside, "../outside"):
        with pytest.raises(PathOutsideRootsError):
            source(library)
    (roots[0] / "leak.py").symlink_to(outside / "0.py")
    with pytest.raises(PathOutsideRootsError, match=r"leak\.py"):
        source(roots[0])
    with pytest.raises(registry.FactoryError, match="data_roots"):
        source(outside, data_roots=["/"])


def test_a_secret_that_was_not_granted_is_named() -> None:
    factory = Factory.model_validate({"factory": "adamw", "args": {"lr": {"secret": "LR"}}})
    with pytest.raises(registry.FactoryError, match="the secret LR was not granted"):
        registry.create("optimizer", factory, [])
