"""Nodes that share a storage tell the same name of it, and others do not."""

import threading
from pathlib import Path

from services.worker.agent.storage.identity import storage_identity


def test_agents_that_come_at_once_agree_and_another_storage_has_another_name(
    tmp_path: Path,
) -> None:
    root = tmp_path / "shared"
    found: list[str | None] = []
    agents = [
        threading.Thread(target=lambda: found.append(storage_identity(root))) for _ in range(8)
    ]
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join()
    (name,) = set(found)
    assert name is not None
    assert storage_identity(root) == name
    assert storage_identity(tmp_path / "other") not in {name, None}
    assert [path.name for path in root.iterdir()] == [".storage-id"]


def test_a_storage_that_cannot_be_used_has_no_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert storage_identity(tmp_path / "file" / "below") is None
    (tmp_path / ".storage-id").write_text("not a name")
    assert storage_identity(tmp_path) is None
