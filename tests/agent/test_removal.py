"""Folders that ranks have made as deep, as odd or as unquiet as they can are removed all the same."""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import tracemalloc
from functools import partial
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from services.contract.messages.facts import Fact, LaunchRefused
from services.contract.words.ids import checkpoint_id, new_job_id
from services.worker.agent.host import removal, reserve
from services.worker.agent.host.folders import AttemptFolder, NodeFolder
from services.worker.agent.host.removal import remove_tree
from services.worker.agent.host.reserve import THREADS, in_storage_thread
from services.worker.agent.storage import shared_files
from services.worker.agent.storage.job_storage import Storage
from services.worker.agent.supervisor import Supervisor
from tests.agent.conftest import JOB, NODE, launch
from tests.waiting import until

DEEPER_THAN_CALLS_NEST = 1_200


def make_deep(folder: Path) -> None:
    """Folders in folders, with a file and a link beside each."""
    folder.mkdir(parents=True, exist_ok=True)
    here = os.open(folder, os.O_RDONLY)
    for _ in range(DEEPER_THAN_CALLS_NEST):
        os.mkdir("d", dir_fd=here)
        os.mkdir("empty", dir_fd=here)
        os.symlink("/", "link", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)


def test_a_deep_folder_goes_with_its_links_and_what_they_lead_to_stays(tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir()
    (others / "file").write_text("whole")
    make_deep(tmp_path / "deep")
    (tmp_path / "deep" / "to others").symlink_to(others)
    os.mkfifo(tmp_path / "deep" / "pipe")
    remove_tree(tmp_path / "deep")
    (tmp_path / "link").symlink_to(others)
    remove_tree(tmp_path / "link")
    assert [path.name for path in tmp_path.iterdir()] == ["others"]
    assert (others / "file").read_text() == "whole"
    with pytest.raises(FileNotFoundError):
        remove_tree(tmp_path / "deep")


def test_folders_that_nobody_may_list_or_write_in_go_for_their_owner() -> None:
    program = (
        "import os, pathlib, sys; os.getuid() or os.setresuid(*[65534] * 3); "
        "folder = pathlib.Path(sys.argv[1]); "
        "inner = folder / 'a' / 'b' / 'c'; inner.mkdir(parents=True); (inner / 'file').touch(); "
        "[each.chmod(0) for each in (inner, *inner.parents[:3])]; "
        "removal.remove_tree(folder); print(folder.exists())"
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                f"from services.worker.agent.host import removal; {program}",
                f"{folder}/x",
            ],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parents[2],
        )
    assert done.stdout == "False\n", done.stderr


def test_one_call_removes_so_many_levels_and_the_next_ones_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "_MOST_LEVELS", 500)
    make_deep(tmp_path / "deep")
    for _ in range(2):
        with pytest.raises(OSError, match="too many levels, or is still written to"):
            remove_tree(tmp_path / "deep")
    remove_tree(tmp_path / "deep")


@pytest.mark.parametrize("within", ["", "inner"])
def test_names_that_take_much_memory_are_removed_in_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: str
) -> None:
    monkeypatch.setattr(removal, "_MOST_NAMES", 500)
    folder = tmp_path / "wide" / within
    folder.mkdir(parents=True)
    for number in range(4_000):
        (folder / f"{number:0250}").touch()
    tracemalloc.start()
    try:
        remove_tree(tmp_path / "wide")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert not (tmp_path / "wide").exists()
    assert most < 4_000 * 250 / 2


def test_deep_folders_among_a_node_s_files_end_neither_its_gangs_nor_its_rounds(
    tmp_path: Path,
) -> None:
    node = NodeFolder(tmp_path / "home", NODE, tmp_path)
    attempt = node.attempt(JOB, 1)
    attempt.open(launch().plan.ranks)
    attempt.close(LaunchRefused(job_id=JOB, fence=1, node_id=NODE, reason="any"))
    make_deep(attempt.path / "deep")
    make_deep(attempt.boards)
    attempt.remove_boards()
    assert not attempt.boards.exists()
    assert node.prune([JOB]) == [attempt.path]
    assert not attempt.path.exists()


def test_boards_are_removed_beside_the_loop_that_renews_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def remove(_folder: AttemptFolder) -> None:
        threads.append(threading.get_ident())

    monkeypatch.setattr(AttemptFolder, "remove_boards", remove)
    nothing: Any = None
    gang: Any = Ended()
    node = NodeFolder(tmp_path / "home", NODE, tmp_path)
    told: list[Fact] = []

    async def end() -> None:
        storage = Storage(tmp_path, NODE)
        supervisor = Supervisor(NODE, node, storage, nothing, nothing, told.append)
        supervisor._conclude((JOB, 1), gang)
        await supervisor.emptied()
        while not threads:  # noqa: ASYNC110 a thread sets no event of this loop
            await asyncio.sleep(0)

    asyncio.run(end())
    assert len(told) == 1
    assert threads != [threading.get_ident()]


class Ended:
    """A gang that has ended."""

    def end(self) -> LaunchRefused:
        return LaunchRefused(job_id=JOB, fence=1, node_id=NODE, reason="any")

    def conclude(self, _end: LaunchRefused) -> None: ...


def test_of_two_that_remove_the_same_neither_keeps_the_other_from_it(tmp_path: Path) -> None:
    """The purge of a job failed for good while what one of its attempts had left was still being removed."""
    raised: list[OSError] = []

    def remove(folder: Path) -> None:
        try:
            remove_tree(folder)
        except OSError as error:
            raised.append(error)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        for number in range(12):
            left = tmp_path / f"job-{number}" / "shards" / "left"
            make_wide(left, levels=4)
            other = threading.Thread(target=remove, args=(left,))
            other.start()
            # As a purge does, once the other has begun.
            until(partial(has_begun, left))
            purged = left.parent.parent.rename(tmp_path / "purged")
            remove_tree(purged)
            other.join()
            assert not purged.exists()
    finally:
        sys.setswitchinterval(interval_s)
    assert all(isinstance(error, FileNotFoundError) for error in raised)


def has_begun(left: Path) -> bool:
    try:
        return len(list(left.iterdir())) != 4
    except FileNotFoundError:
        return True


def make_wide(folder: Path, levels: int) -> None:
    folder.mkdir(parents=True)
    for number in range(4 if levels else 0):
        make_wide(folder / str(number), levels - 1)


@pytest.mark.parametrize("inner", ["", "a"], ids=["at its top", "within"])
def test_who_goes_on_to_write_in_a_folder_keeps_its_removal_from_its_end_for_a_while_and_no_longer(
    inner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight such removals, which a rank can have at will, took all threads of a node: it removed nothing of anybody's."""
    folder = tmp_path / "left"
    (folder / "a").mkdir(parents=True)
    now, names = [0.0], removal._names

    def written_to(descriptor: int) -> list[str]:
        now[0] += 1.0
        with contextlib.suppress(FileNotFoundError):
            (folder / inner / f"file-{now[0]}").touch()
        return names(descriptor)

    monkeypatch.setattr(removal, "_names", written_to)
    monkeypatch.setattr(removal, "_MOST_NAMES", 1)
    monkeypatch.setattr(removal, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with pytest.raises(OSError, match="still written to"):
        remove_tree(folder, 100.0)
    assert 100 <= now[0] <= 103
    monkeypatch.undo()
    remove_tree(folder)
    assert not folder.exists()


def test_few_threads_of_the_storage_wait_for_removals(monkeypatch: pytest.MonkeyPatch) -> None:
    """With sixteen launches on a node that had something to remove commits waited for two seconds, with 48 for six."""
    monkeypatch.setattr(reserve, "REMOVED_WITHIN_S", 60.0)
    released, answers = threading.Event(), Queue[bool]()

    def remove() -> None:
        answers.put(reserve.removed_soon(lambda: assert_released(released)))

    waiting = [threading.Thread(target=remove) for _ in range(THREADS)]
    for each in waiting:
        each.start()
    try:
        assert [answers.get(timeout=60) for _ in range(THREADS - 4)] == [False] * (THREADS - 4)
    finally:
        released.set()
    assert [answers.get(timeout=60) for _ in range(4)] == [True] * 4
    for each in waiting:
        each.join()


def assert_released(released: threading.Event) -> None:
    assert released.wait(60)


def test_removals_that_take_long_keep_no_other_job_from_being_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of sixteen jobs had left a million files: the next launch on their node waited for 45 s, as would a commit."""
    released = threading.Event()

    def take_long(folder: Path) -> None:
        released.wait()
        remove_tree(folder)

    monkeypatch.setattr(shared_files, "remove_tree", take_long)
    monkeypatch.setattr(reserve, "REMOVED_WITHIN_S", 0.0)
    storage = Storage(tmp_path, NODE)
    jobs = [new_job_id(1_700_000_000_000, bytes([n] * 10)) for n in range(THREADS + 1)]
    left = [tmp_path / job / "shards" / checkpoint_id(job, 1, 1) for job in jobs]
    for folder in left:
        folder.mkdir(parents=True)

    async def open_all() -> None:
        async with asyncio.timeout(30):
            await asyncio.gather(
                *(
                    in_storage_thread(
                        storage.open_attempt, launch(2).model_copy(update={"job_id": job})
                    )
                    for job in jobs
                )
            )
        assert all(folder.exists() for folder in left)

    try:
        asyncio.run(open_all())
    finally:
        released.set()
    until(lambda: not any(folder.exists() for folder in left))
