"""A storage of several nodes, in a folder or in a bucket, as tests use it."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from services.contract.messages.commands import (
    CommitCheckpoint,
    VerifyCheckpoint,
)
from services.contract.storage.bucket import Bucket
from services.contract.storage.commit_chain import CommitChain
from services.contract.storage.manifests import Manifest, ShardFile
from services.contract.storage.storage_address import BucketAddress
from services.contract.words.ids import checkpoint_id
from services.worker.agent.storage.bucket_files import BucketFiles
from services.worker.agent.storage.job_storage import Storage
from tests.agent.conftest import JOB
from tests.s3_server import BUCKET, S3Server

CONTENT = b"what a rank has trained"
SHARD = ShardFile(
    rank=0, name="rank-0.bin", bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest()
)
PART = 5 << 20
NODES = ("node-1", "node-2")


@dataclass
class Place:
    """One storage, seen from several nodes, and how a test looks at it or damages it.

    ``server`` None: in a folder.
    """

    folder: Path
    server: S3Server | None
    prefix: str
    most_copies: int = 1 << 30
    storages: dict[str, Storage] = field(default_factory=dict)

    def on(self, node: str) -> Storage:
        """The storage as ``node`` uses it."""
        if node not in self.storages:
            files = self.folder
            if self.server is not None:
                bucket = Bucket(BucketAddress(BUCKET, self.prefix), PART)
                copies = self.folder / "copies" / node
                self.storages[node] = Storage(BucketFiles(bucket, copies, self.most_copies), node)
            else:
                self.storages[node] = Storage(files, node)
        return self.storages[node]

    def names(self, below: str = JOB) -> set[str]:
        """All files that all nodes see, drafts not."""
        if self.server is None:
            found = {
                path.relative_to(self.folder) for path in self.folder.rglob("*") if path.is_file()
            }
            names = {path.as_posix() for path in found}
        else:
            names = {key.removeprefix(f"{self.prefix}/") for key in self.server.keys(self.prefix)}
        return {name.removeprefix(f"{below}/") for name in names if name.startswith(f"{below}/")}

    def read(self, name: str) -> str:
        """A file in the bucket."""
        assert self.server is not None
        key = f"{self.prefix}/{JOB}/{name}"
        body = self.server.client().get_object(Bucket=BUCKET, Key=key)["Body"]
        return str(body.read().decode())

    def damage(self, name: str, content: bytes) -> None:
        """Put something else in the place of a file that all nodes see."""
        if self.server is None:
            (self.folder / JOB / name).write_bytes(content)
        else:
            key = f"{self.prefix}/{JOB}/{name}"
            self.server.client().put_object(Bucket=BUCKET, Key=key, Body=content)

    def save(self, node: str, step: int, fence: int = 1, content: bytes = CONTENT) -> Manifest:
        """What rank 0 writes on this node; its agent has all nodes see it, before it votes."""
        name = checkpoint_id(JOB, step, fence)
        storage = self.on(node)
        path = CommitChain(storage.root, JOB).shard_folder(name) / SHARD.name
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        storage.files.publish(path)
        return Manifest(
            job_id=JOB, checkpoint_id=name, fence=fence, step=step, world_size=1, shards=(SHARD,)
        )

    def committed(self, node: str) -> list[int]:
        """The steps of the checkpoints that this node sees as committed."""
        return [manifest.step for manifest in self.on(node).chain(JOB).committed()]


def commit(manifest: Manifest) -> CommitCheckpoint:
    return CommitCheckpoint(job_id=JOB, fence=manifest.fence, manifest=manifest)


def verify(manifest: Manifest) -> VerifyCheckpoint:
    return VerifyCheckpoint(job_id=JOB, fence=1, checkpoint_id=manifest.checkpoint_id)
