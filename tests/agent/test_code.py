"""Uploaded code on a node: fetched by its digest, unpacked once, given to the ranks of one job alone."""

import asyncio
import os
import stat
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import JsonValue
from redis import Redis

from services.contract.jobs.code_archives import digest_of, hex_of, pack, unpack
from services.contract.jobs.specs import JobSpec
from services.contract.messages.commands import LaunchGang
from services.contract.messages.facts import GangEnded, LaunchRefused, NodeJoined
from services.contract.messages.probe_ids import probe_id
from services.contract.messages.probing import ModelProbed
from services.contract.redis import redis_keys as keys
from services.contract.system.rank_user import RankUser
from services.contract.words.ids import new_job_id
from services.controller.adapters.redis import redis_ports
from services.controller.domain.access.code import CodeLimits, UploadedCode
from services.local.embedded_redis import EmbeddedRedis
from services.worker.agent.ranks import code_cache
from services.worker.agent.ranks.code_cache import (
    KEPT_UNUSED,
    CodeCache,
    NoCodeError,
    forget_drafts,
)
from services.worker.agent.streams.redis_clients import writing_client
from services.worker.rank.process.seat import DEFAULT_TRAINER
from tests.agent.conftest import Controller, StartAgent, agents_on, launch
from tests.agent.test_probes import question
from tests.contract.test_code_archives import HOSTILE
from tests.waiting import until

pytestmark = pytest.mark.redis
JOB = new_job_id(1_700_000_000_000, bytes(10))


def archive(text: str = "WIDTH = 1\n") -> bytes:
    return pack([("pkg/brought.py", text.encode(), False)])


def upload(url: str, *bodies: bytes) -> None:
    """Keep archives as a controller does, without its judgement."""

    async def keep() -> None:
        async with redis_ports(url) as ports:
            for body in bodies:
                code = UploadedCode(
                    digest=digest_of(body),
                    bytes=len(body),
                    files=1,
                    unpacked_bytes=1,
                    uploaded_by="a",
                    uploaded_ms=1,
                )
                await ports.codes.keep(code, body, CodeLimits())

    asyncio.run(keep())


@dataclass
class Node:
    """A cache, and what it may take from: a Redis, and a storage."""

    cache: CodeCache
    folder: Path
    storage: Path
    url: str

    async def holds(self, body: bytes, job_id: str | None = None) -> bool:
        """Whether the folder has the archive as it was packed; it is released."""
        folder = await self.cache.acquire(digest_of(body), job_id)
        self.cache.release(digest_of(body))
        return (folder / "pkg/brought.py").read_text() in body_text(body)


def body_text(body: bytes) -> str:
    return next(text for text in (f"WIDTH = {n}\n" for n in range(99)) if archive(text) == body)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def node(redis_url: str, tmp_path: Path) -> AsyncIterator[Node]:
    folder, storage = tmp_path / "node" / "code", tmp_path / "storage"
    storage.mkdir()
    async with writing_client(redis_url) as client:
        yield Node(CodeCache(client, folder, storage), folder, storage, redis_url)


def wipe(url: str) -> None:
    with Redis.from_url(url) as redis:
        redis.flushdb()


@pytest.mark.anyio
async def test_launches_at_once_fetch_and_unpack_code_once_and_nobody_can_write_there(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = pack([(f"pkg/m{n}.bin", os.urandom(200_000), False) for n in range(5)])  # several parts
    unpacked, plainly = [], unpack

    def counted(body: bytes, folder: Path) -> None:
        unpacked.append(folder)
        plainly(body, folder)

    monkeypatch.setattr(code_cache, "unpack", counted)
    await asyncio.to_thread(upload, node.url, body)
    folders = await asyncio.gather(*(node.cache.acquire(digest_of(body)) for _ in range(4)))
    assert set(folders) == {node.folder / hex_of(digest_of(body))}
    assert len(unpacked) == 1
    assert sorted(p.name for p in (folders[0] / "pkg").iterdir()) == [f"m{n}.bin" for n in range(5)]
    everything = [folders[0], *folders[0].rglob("*")]
    assert not any(stat.S_IMODE(path.stat().st_mode) & 0o222 for path in everything)
    assert sorted(p.name for p in node.folder.iterdir()) == [
        folders[0].name,
        f"{folders[0].name}.tar.gz",
    ]


@pytest.mark.anyio
async def test_damaged_code_is_noticed_and_made_again(node: Node) -> None:
    body = archive()
    await asyncio.to_thread(upload, node.url, body)
    folder = await node.cache.acquire(digest_of(body))
    (folder / "pkg").chmod(0o700)
    (folder / "pkg/json.py").write_text("raise SystemExit")
    assert await node.holds(body)
    assert not (folder / "pkg/json.py").exists()
    kept = node.folder / f"{folder.name}.tar.gz"
    kept.write_bytes(kept.read_bytes()[:-9])
    assert await node.holds(body)
    wipe(node.url)
    kept.write_bytes(b"")
    with pytest.raises(NoCodeError, match="neither in Redis"):
        await node.cache.acquire(digest_of(body))


@pytest.mark.anyio
async def test_a_job_keeps_a_copy_in_its_storage_for_when_redis_has_lost_it(
    node: Node, tmp_path: Path
) -> None:
    body = archive()
    await asyncio.to_thread(upload, node.url, body)
    assert await node.holds(body, JOB)
    copy = node.storage / JOB / "code.tar.gz"
    assert copy.read_bytes() == body
    wipe(node.url)
    async with writing_client(node.url) as client:
        later = CodeCache(client, tmp_path / "later" / "code", node.storage)
        assert (await later.acquire(digest_of(body), JOB) / "pkg/brought.py").is_file()
        other = CodeCache(client, tmp_path / "other" / "code", node.storage)
        copy.write_bytes(body[:-1])
        with pytest.raises(
            NoCodeError, match=f"nor complete in .*{JOB}.*upload the same files again"
        ):
            await other.acquire(digest_of(body), JOB)
        copy.unlink()
        copy.symlink_to(tmp_path / "later" / "code" / f"{hex_of(digest_of(body))}.tar.gz")
        with pytest.raises(NoCodeError):
            await other.acquire(digest_of(body), JOB)
    assert copy.is_symlink()


@pytest.mark.anyio
async def test_what_a_controller_should_not_have_let_through_is_refused_by_the_node(
    node: Node,
) -> None:
    """A controller that was bypassed, or an archive whose bytes in Redis are others."""
    hostile = [body for body, _ in HOSTILE.values()]
    await asyncio.to_thread(upload, node.url, *hostile)
    for body in hostile:
        with pytest.raises(NoCodeError, match="refused"):
            await node.cache.acquire(digest_of(body))
    assert list(node.folder.iterdir()) == []
    body = archive()
    await asyncio.to_thread(upload, node.url, body)
    with Redis.from_url(node.url) as redis:
        redis.hset(keys.code(hex_of(digest_of(body))), "0", archive("WIDTH = 2\n"))
    with pytest.raises(NoCodeError, match="neither in Redis"):
        await node.cache.acquire(digest_of(body))


@pytest.mark.anyio
async def test_the_least_recently_used_code_is_removed_unless_it_is_in_use(node: Node) -> None:
    bodies = [archive(f"WIDTH = {n}\n") for n in range(KEPT_UNUSED + 3)]
    await asyncio.to_thread(upload, node.url, *bodies)
    await node.cache.acquire(digest_of(bodies[0]))
    for body in bodies[1:]:
        assert await node.holds(body)
    assert await node.holds(bodies[0])
    names = {path.name for path in node.folder.iterdir()}
    gone = [n for n, body in enumerate(bodies) if hex_of(digest_of(body)) not in names]
    # Of the last one's lending nothing had to go, for it was in use itself then.
    assert gone == [1, 2]
    assert len(names) == 2 * (KEPT_UNUSED + 1)
    assert await node.holds(bodies[1])  # it is fetched again


@pytest.mark.skipif(os.getuid() != 0, reason="only root can have ranks of another user")
def test_ranks_of_another_user_read_the_code_and_nothing_beside_it(redis_url: str) -> None:
    body, nobody = archive(), RankUser.named("nobody")
    upload(redis_url, body)

    async def acquire(folder: Path) -> Path:
        async with writing_client(redis_url) as client:
            return await CodeCache(client, folder, folder, nobody).acquire(digest_of(body))

    with tempfile.TemporaryDirectory() as home:
        Path(home).chmod(0o711)
        node = Path(home) / "nodes" / "node-1"
        node.mkdir(parents=True, mode=0o700)
        node.parent.chmod(0o700)
        folder = asyncio.run(acquire(node / "code"))

        def run(*command: str | Path) -> bytes:
            done = subprocess.run(command, user=nobody.uid, group=nobody.gid, capture_output=True)  # noqa: PLW1510 its code says nothing
            return done.stdout or done.stderr

        assert run("cat", folder / "pkg/brought.py") == b"WIDTH = 1\n"
        assert run("ls", folder) == b"pkg\n"
        for command in (("ls", node), ("ls", node / "code"), ("touch", folder / "x")):
            assert b"ermission denied" in run(*command)


def test_what_an_agent_that_died_left_is_removed(tmp_path: Path) -> None:
    draft = tmp_path / ".draft-1"
    (draft / "pkg").mkdir(parents=True)
    (draft / "pkg/x.py").write_text("")
    (draft / "pkg").chmod(0o555)
    draft.chmod(0o555)
    (tmp_path / ".draft-2").write_text("")
    (tmp_path / "kept").mkdir()
    forget_drafts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


# --- with a real agent and the real trainer -----------------------------------------------------

MODEL = """
import subprocess, sys
from torch import nn
from inner.width import WIDTH

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, WIDTH)
        self.head = nn.Linear(WIDTH, 256)
        child = "import inner.width, services; print(f'a child has {inner.width.WIDTH}')"
        said = subprocess.run([sys.executable, "-c", child], check=True, capture_output=True)
        print("width", WIDTH, said.stdout.decode().strip(), flush=True)

    def forward(self, tokens):
        return self.head(self.table(tokens))
"""


def brought(width: int) -> bytes:
    files = {"brought.py": MODEL, "inner/width.py": f"WIDTH = {width}\n"}
    return pack([(name, text.encode(), False) for name, text in files.items()])


def job(fence: int, body: bytes | None, model: dict[str, JsonValue]) -> LaunchGang:
    spec = JobSpec.model_validate(
        {
            "model": model,
            "data": {"factory": "stdlib_bytes", "args": {"seq_len": 16}},
            "train": {"steps": 2, "global_batch": 2},
            "resources": {"ranks": 2, "device": "cpu"},
            "code": None if body is None else digest_of(body),
        }
    )
    return launch(fence).model_copy(update={"spec": spec})


@pytest.fixture(scope="module")
def start(
    redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartAgent]:
    redis_server.flush()
    with agents_on(redis_server.url, tmp_path_factory.mktemp("code")) as start:
        yield start


@pytest.mark.system
@pytest.mark.ranks
def test_each_job_imports_from_its_own_code_alone(
    start: StartAgent, redis_server: EmbeddedRedis
) -> None:
    controller = Controller(redis_server.url)
    narrow, wide = brought(4), brought(8)
    hostile = HOSTILE["symlink"][0]
    upload(redis_server.url, narrow, wide, hostile)
    controller.open_job()
    agent = start(MESHLOOM_TRAINER=DEFAULT_TRAINER)
    controller.fact(NodeJoined)
    model: dict[str, JsonValue] = {"factory": "brought:Model"}
    for fence, body in enumerate([narrow, wide, None], 1):
        controller.open_job(fence)
        controller.send(job(fence, body, model))
        ended = controller.fact(GangEnded, lambda fact, fence=fence: fact.fence == fence)  # type: ignore[misc] # bound now
        if body is None:
            assert "No module named 'brought'" in str(ended.exits[0].error)
        else:
            assert [e.finished for e in ended.exits] == [True, True], ended
            copy = agent.checkpoint_root / ended.job_id / "code.tar.gz"
            assert copy.read_bytes() == body
            width = 4 if body is narrow else 8
            told = f"width {width} a child has {width}"
            until(lambda told=told: told in [line.text for line in controller.logs()])  # type: ignore[misc] # bound now
    controller.open_job(4)
    controller.send(job(4, hostile, model))
    refused = controller.fact(LaunchRefused)
    assert "'a' is a symbolic link" in refused.reason

    asked = question("brought:Model", {})
    with_code = asked.spec.model_copy(
        update={"code": digest_of(wide), "data": job(1, wide, model).spec.data}
    )
    asked = asked.model_copy(update={"spec": with_code, "stops": ()})
    asked = asked.model_copy(update={"probe_id": probe_id(asked, {})})
    controller.send(asked)
    (answer,) = until(lambda: controller.all_of(ModelProbed), timeout_s=240)
    assert answer.failure is None, answer.failure
    assert answer.profile is not None
    controller.client.close()
