"""Files of checkpoints that are read: what others may have put in their place."""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from services.contract.storage.manifests import ShardFile
from services.worker.rank.checkpoints import shard_file
from tests.disk import as_somebody_else, dead_disk
from tests.waiting import until

# A process of its own, which can be ended: the library waits at a pipe with the interpreter's lock.
_READS = """
import sys
from pathlib import Path
from services.contract.storage.manifests import ShardFile
from services.worker.rank.checkpoints import shard_file
try:
    with shard_file.opened(Path(sys.argv[1]), ShardFile.model_validate_json(sys.argv[2])):
        pass
except shard_file.CorruptShardError as error:
    print(error.reason)
"""


def test_a_pipe_in_the_place_of_a_shard_is_told_as_a_corrupt_file_and_not_waited_for(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "shards" / "checkpoint"
    shard = shard_file.write(folder, 0, {"weight": torch.ones(4)}, {})
    (folder / shard.name).unlink()
    os.mkfifo(folder / shard.name)

    told = subprocess.run(
        [sys.executable, "-c", _READS, str(folder), shard.model_dump_json()],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )

    assert "not a plain file" in told.stdout


def test_a_shard_of_another_size_is_told_without_reading_it(tmp_path: Path) -> None:
    """One of holes takes no room and could be read for hours."""
    folder = tmp_path / "shards" / "checkpoint"
    shard = shard_file.write(folder, 0, {"weight": torch.ones(4)}, {})
    os.truncate(folder / shard.name, 1 << 40)
    with pytest.raises(shard_file.CorruptShardError, match=f"it has {1 << 40} bytes"):
        shard_file.verify(folder, shard)


def test_a_disk_whose_server_has_died_is_waited_for_and_makes_no_file_corrupt(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "shards" / "checkpoint"
    shard = shard_file.write(folder, 0, {"weight": torch.ones(4)}, {})

    with ThreadPoolExecutor(1) as pool:
        with dead_disk(folder):
            reading = pool.submit(_weight, folder, shard)
            until(lambda: "waits for the storage" in capfd.readouterr().err)
            assert not reading.done()
        assert reading.result(60).tolist() == [1.0] * 4


def test_a_shard_that_its_user_may_not_read_is_not_called_corrupt() -> None:
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top) / "shards" / "checkpoint"
        shard = shard_file.write(folder, 0, {"weight": torch.ones(4)}, {})
        for path in (folder, *folder.parents[:2]):
            path.chmod(0o755)
        (folder / shard.name).chmod(0o600 if os.geteuid() == 0 else 0)
        with as_somebody_else():
            for read in (_weight, shard_file.verify):
                with pytest.raises(PermissionError):
                    read(folder, shard)


def _weight(folder: Path, shard: ShardFile) -> torch.Tensor:
    with shard_file.opened(folder, shard) as reader:
        return reader.tensor("weight")
