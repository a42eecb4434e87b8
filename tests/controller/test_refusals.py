"""What Redis refuses in the middle of a script or between two commands leaves no half of a write."""

import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import pytest
from redis import Redis
from structlog.testing import capture_logs

from services.contract.messages.commands import StopGang
from services.contract.redis import redis_keys as keys
from services.controller.adapters.redis import redis_ports
from services.controller.api.problems import refusal
from services.controller.domain.access.code import CodeLimits
from services.controller.domain.decisions.dispatch import first_decision
from services.controller.domain.errors import StoreUnavailableError
from services.controller.domain.job.effects import Send
from services.controller.domain.plans.plan import fail
from services.controller.domain.scheduling.node import Drain, Measurement
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Change, Claim, Stored
from services.local.embedded_redis import EmbeddedRedis
from tests.controller.agent_double import append_fact
from tests.controller.histories import NODE, finished, launched, node, placed, play, saved
from tests.controller.profiles import FACTS, answer_to
from tests.controller.stores.worlds import ACTOR, ASK, MEASURE, QUESTION, job, plan, uploaded

pytestmark = [pytest.mark.anyio, pytest.mark.redis]
# What scripts and transactions of the controller write with, and one that reads.
COMMANDS: Final = (
    *("set", "del", "incr", "rename", "expire", "persist", "publish", "exists", "hset", "hdel"),
    *(
        "hincrby",
        "sadd",
        "srem",
        "zadd",
        "zrem",
        "zremrangebyscore",
        "xadd",
        "xdel",
        "xgroup",
        "lpop",
    ),
)
Act = Callable[[], Awaitable[object]]


@dataclass
class World:
    """The controller's ports with rights that a test takes, and all rights beside them."""

    ports: Ports
    redis: Redis

    async def keep(self) -> Stored:
        return await self.ports.jobs.create(first_decision(job()), ACTOR, None)

    async def lead(self) -> int:
        epoch = await self.ports.leadership.take("a")
        assert epoch is not None
        return epoch


async def _create(w: World) -> Act:
    made = first_decision(job())
    return lambda: w.ports.jobs.create(made, ACTOR, Claim("alice", "key", "digest"))


async def _commit(w: World) -> Act:
    kept, doomed = await w.keep(), await w.keep()
    doomed = await w.ports.jobs.commit(
        Change(doomed, play(doomed.job, [placed(doomed.job)]), ACTOR)
    )
    decision = play(kept.job, [placed(kept.job), *saved(kept.job, 10)])
    change = Change(kept, decision, ACTOR, deletes=doomed)
    epoch = await w.lead()
    return lambda: w.ports.jobs.commit(change, epoch)


async def _commit_end(w: World) -> Act:
    kept = await w.keep()
    events = [placed(kept.job), launched(kept.job), *saved(kept.job, 10), finished(kept.job)]
    change = Change(kept, play(kept.job, events), ACTOR)
    epoch = await w.lead()
    return lambda: w.ports.jobs.commit(change, epoch)


async def _restore(w: World) -> Act:
    epoch, made = await w.lead(), first_decision(job())
    return lambda: w.ports.jobs.restore(made, ACTOR, epoch)


async def _delete(w: World) -> Act:
    kept = await w.keep()
    kept = await w.ports.jobs.commit(Change(kept, play(kept.job, [placed(kept.job)]), ACTOR))
    return lambda: w.ports.jobs.delete(kept)


async def _send(w: World) -> Act:
    epoch = await w.lead()
    sends = tuple(
        Send(name, StopGang(job_id=job().id, fence=1, mode="kill")) for name in (NODE, "loom-2")
    )
    return lambda: w.ports.jobs.send(sends, epoch)


async def _put_node(w: World) -> Act:
    epoch = await w.lead()
    return lambda: w.ports.nodes.put(node(), epoch, None)


async def _forget_node(w: World) -> Act:
    epoch = await w.lead()
    await w.ports.nodes.put(node(), epoch, None)
    await w.ports.nodes.drain(NODE, Drain(asked_ms=1))
    await w.ports.nodes.keep_measured(NODE, "cpu", Measurement(facts=FACTS, at_ms=7), epoch)
    return lambda: w.ports.nodes.forget(node(), epoch)


async def _drain(w: World) -> Act:
    epoch = await w.lead()
    await w.ports.nodes.put(node(), epoch, None)
    return lambda: w.ports.nodes.drain(NODE, Drain(asked_ms=1))


async def _measured(w: World) -> Act:
    epoch = await w.lead()
    await w.ports.plans.keep(plan(), ASK, MEASURE)
    found = Measurement(facts=FACTS, at_ms=7)
    return lambda: w.ports.nodes.keep_measured(NODE, "cpu", found, epoch)


async def _facts(w: World) -> Act:
    await w.ports.facts.prepare()
    for body in ("one", "two", "three"):
        append_fact(w.redis, NODE, body)
    return lambda: w.ports.facts.next(2, 0.01)


async def _acknowledge(w: World) -> Act:
    await w.ports.facts.prepare()
    for body in ("one", "two"):
        append_fact(w.redis, NODE, body)
    ids = [entry.id for entry in await w.ports.facts.next(2, 0.01)]
    return lambda: w.ports.facts.acknowledge(ids)


async def _keep_plan(w: World) -> Act:
    await w.ports.plans.keep(plan(1), ASK, None)
    await w.ports.plans.keep_answer(answer_to(QUESTION), await w.lead())
    return lambda: w.ports.plans.keep(plan(), ASK, MEASURE, fresh=True)


async def _conclude(w: World) -> Act:
    await w.ports.plans.keep(plan(), ASK, None)
    return lambda: w.ports.plans.conclude(fail(plan(), "crashed", "it crashed"))


async def _keep_answer(w: World) -> Act:
    epoch = await w.lead()
    await w.ports.plans.keep(plan(), ASK, None)
    return lambda: w.ports.plans.keep_answer(answer_to(QUESTION), epoch)


async def _code_kept(w: World) -> Act:
    body = b"code"
    return lambda: w.ports.codes.keep(uploaded(body), body, CodeLimits())


async def _code_forgotten(w: World) -> Act:
    epoch, body = await w.lead(), b"code"
    await w.ports.codes.keep(uploaded(body), body, CodeLimits())
    later = await w.ports.clock.now_ms() + 60_000
    return lambda: w.ports.codes.forget(uploaded(body).digest, later, epoch)


async def _take_lead(w: World) -> Act:
    return lambda: w.ports.leadership.take("a")


async def _ask_back(w: World) -> Act:
    name = job().id
    return lambda: w.ports.telemetry.ask_back(name, 1, NODE)


async def _ended(w: World) -> Stored:
    kept = await w.keep()
    events = [placed(kept.job), launched(kept.job), *saved(kept.job, 10), finished(kept.job)]
    kept = await w.ports.jobs.commit(Change(kept, play(kept.job, events), ACTOR))
    for key in (keys.job_steps, keys.job_metrics, keys.job_logs):
        for number in range(6):
            w.redis.xadd(key(kept.job.id), {keys.MESSAGE_FIELD: str(number)})
    return kept


async def _put_together(w: World) -> Act:
    kept = await _ended(w)
    name = kept.job.id
    await w.ports.telemetry.ask_back(name, 1, NODE)
    for key in (keys.recalled_steps, keys.recalled_logs, keys.recalled_events):
        w.redis.xadd(key(name), {keys.MESSAGE_FIELD: "old"}, id="5-1", nomkstream=True)
    asked = w.redis.hget(keys.recalled(name), "asked")
    w.redis.hset(keys.recalled(name), "done", str(asked))
    return lambda: w.ports.telemetry.put_together(name, has_ended=True)


async def _closed(w: World) -> Act:
    kept = await _ended(w)
    for number in range(12):
        last = w.redis.xadd(keys.job_events(kept.job.id), {keys.MESSAGE_FIELD: str(number)})
    return lambda: w.ports.telemetry.closed(kept.job.id, kept.job.fence, str(last))


ACTS: Final[Mapping[str, Callable[[World], Awaitable[Act]]]] = {
    act.__name__: act
    for act in (
        *(_create, _commit, _commit_end, _restore, _delete, _send, _put_node, _forget_node, _drain),
        *(_measured, _facts, _acknowledge, _keep_plan, _conclude, _keep_answer, _code_kept),
        *(_code_forgotten, _take_lead, _ask_back, _put_together, _closed),
    )
}


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with (
        tempfile.TemporaryDirectory(prefix="meshloom-redis-") as folder,
        EmbeddedRedis.start(Path(folder)) as started,
    ):
        yield started


@pytest.fixture
async def world(server: EmbeddedRedis) -> AsyncIterator[World]:
    with Redis.from_url(server.url, decode_responses=True) as admin:
        admin.execute_command("ACL", "SETUSER", "owner", "on", ">owner", "~*", "&*", "+@all")
    url = f"unix://owner:owner@{server.url.rpartition('@')[2]}"
    with Redis.from_url(url, decode_responses=True, encoding_errors="replace") as redis:
        async with redis_ports(server.url) as ports:
            yield World(ports, redis)


def holds(redis: Redis) -> dict[str, object]:
    """All that is stored, without what Redis counts by itself."""
    read: Mapping[str, Callable[[str], object]] = {
        "string": redis.get,
        "hash": redis.hgetall,
        "set": redis.smembers,
        "zset": lambda key: redis.zrange(key, 0, -1, withscores=True),
        "list": lambda key: redis.lrange(key, 0, -1),
        "stream": redis.xrange,
    }
    found: dict[str, object] = {}
    for key in cast("list[str]", redis.keys()):
        kind = str(redis.type(key))
        if kind == "none":
            continue  # its time was over since it was listed
        found[key] = read[kind](key)
        if redis.ttl(key) >= 0:
            found[f"{key} expires"] = True
    return found


def form(held: Mapping[str, object]) -> dict[str, object]:
    """What is the same of two worlds in which the same was done: how much each key holds."""
    names = sorted(name.replace("job_", "") for name in held if "job_" not in name)
    counts = sorted(
        len(cast("Any", value)) if not isinstance(value, bool | str) else 1
        for value in held.values()
    )
    return {"names": names, "counts": counts}


@contextlib.contextmanager
def forbidden(redis: Redis, command: str) -> Iterator[None]:
    redis.acl_setuser("default", enabled=True, commands=[f"-{command}"])
    try:
        yield
    finally:
        redis.acl_setuser("default", enabled=True, commands=["+@all"])


@contextlib.contextmanager
def full(redis: Redis, _: str) -> Iterator[None]:
    redis.config_set("maxmemory", "1")
    try:
        yield
    finally:
        redis.config_set("maxmemory", "0")


@contextlib.contextmanager
def replica(redis: Redis, _: str) -> Iterator[None]:
    redis.replicaof("127.0.0.1", "1")
    try:
        yield
    finally:
        redis.replicaof("NO", "ONE")


async def fault_of(
    world: World, name: str, refusing: Callable[[Redis, str], Any], command: str
) -> str | None:
    """What of an act that met a refusal is wrong: it was done in part, or was told as done."""
    redis = world.redis
    redis.flushall()
    await (await ACTS[name](world))()
    done = form(holds(redis))
    redis.flushall()
    act = await ACTS[name](world)
    before = holds(redis)
    error: Exception | None = None
    with refusing(redis, command):
        try:
            await act()
        except Exception as refusal:  # noqa: BLE001 each is judged below
            error = refusal
    after = holds(redis)
    if error is None:
        return None if form(after) == done else f"told as done: {form(after)} is not {done}"
    if not isinstance(error, StoreUnavailableError):
        return f"{type(error).__name__}: {error}"
    changed = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
    changed = [key for key in changed if not key.startswith("ml:code:") or ":draft:" not in key]
    return f"refused, and written: {changed}" if changed else None


@pytest.mark.parametrize("name", ACTS)
async def test_what_redis_refuses_half_way_is_told_and_leaves_no_half(
    world: World, name: str
) -> None:
    # A script can ask for its rights from Redis 7 on.
    release = int(str(world.redis.info("server")["redis_version"]).partition(".")[0])
    rights = COMMANDS if release >= 7 else ()
    found = {command: await fault_of(world, name, forbidden, command) for command in rights}
    found["OOM"] = await fault_of(world, name, full, "")
    found["READONLY"] = await fault_of(world, name, replica, "")
    wrong = {fault: told for fault, told in found.items() if told is not None}
    assert wrong == {}


async def test_no_fact_is_lost_while_their_stream_has_another_type(world: World) -> None:
    redis = world.redis
    redis.flushall()
    redis.set(keys.FACTS, "no stream")
    for body in ("one", "two"):
        append_fact(redis, NODE, body)
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            await world.ports.facts.next(2, 0.01)
    redis.delete(keys.FACTS)
    await world.ports.facts.prepare()
    assert [entry.body for entry in await world.ports.facts.next(2, 0.01)] == ["one", "two"]


async def test_why_a_request_alone_gets_no_answer_of_redis_is_in_the_log(tmp_path: Path) -> None:
    address = f"{tmp_path}/nobody.sock"
    async with redis_ports(f"unix://{address}") as ports:
        with pytest.raises(StoreUnavailableError) as away:
            await ports.clock.now_ms()
    with capture_logs() as lines:
        answer = refusal(away.value, {"path": "/v1/jobs"})
    assert b"the controller's log says why" in answer.body
    assert address.encode() not in answer.body
    (line,) = lines
    assert line["event"] == "request_without_store"
    assert address in line["error"]
