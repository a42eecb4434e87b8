"""However many follow a job's logs, the controller's own loops are heard, and the rest is told."""

import asyncio
import contextlib
import tempfile
from pathlib import Path
from typing import cast

import pytest
from redis import Redis
from redis.asyncio.client import PubSub

from services.contract.redis import redis_keys as keys
from services.controller.adapters.redis import redis_ports
from services.controller.adapters.redis.coordination import RedisWaker
from services.controller.api.context import Context
from services.controller.domain.errors import StoreUnavailableError
from services.controller.ports.machines import Log
from services.local.embedded_redis import EmbeddedRedis
from tests.controller.agent_double import append_fact
from tests.controller.conftest import ControlPlane

STREAM = {"Accept": "text/event-stream"}


@pytest.mark.anyio
@pytest.mark.redis
async def test_followers_in_any_number_silence_no_loop(redis_url: str) -> None:
    async with redis_ports(redis_url) as ports:
        await ports.facts.prepare()
        followers = [
            asyncio.create_task(ports.telemetry.wait("job_x", Log.OUTPUT, None, 20))
            for _ in range(120)
        ]
        with Redis.from_url(redis_url, decode_responses=True) as outside:
            async with asyncio.timeout(20):
                while len(outside.client_list()) < 60:  # noqa: ASYNC110 Redis sets no event
                    await asyncio.sleep(0)
            append_fact(outside, "loom-1", "fact")
            (entry,) = await ports.facts.next(10, 5)
            assert entry.body == "fact"
            async with ports.listen() as waker:
                outside.publish(keys.WAKE, "now")
                await waker.wait(5)
            assert await ports.clock.now_ms()
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)


@pytest.mark.anyio
async def test_calls_that_never_end_do_not_keep_whoever_waits_from_going_on() -> None:
    class Calls:
        taken = 0

        async def get_message(self, timeout: float) -> object:  # noqa: ASYNC109 as redis-py has it
            del timeout
            self.taken += 1
            assert self.taken < 1_000_000
            return {"type": "message"}

    calls = Calls()

    async def is_same_life() -> bool:
        return True

    waker = RedisWaker(cast("PubSub", calls), is_same_life)
    for _ in range(3):
        await waker.wait(60)
    assert calls.taken > 3


@pytest.mark.anyio
@pytest.mark.redis
async def test_a_connection_that_calls_of_megabytes_close_does_not_count_as_redis_being_away(
    redis_url: str,
) -> None:
    """Leases that ran out while it was away prove nothing, so no node was lost as long as an agent called."""
    async with redis_ports(redis_url) as ports, ports.listen() as waker:
        with Redis.from_url(redis_url, decode_responses=True) as outside:
            (listening,) = outside.client_list(_type="pubsub")
            outside.client_kill_filter(_id=listening["id"])
            await waker.wait(60)
            assert outside.publish(keys.WAKE, "now") == 1
            await waker.wait(60)


@pytest.mark.redis
def test_a_redis_that_began_again_while_the_loop_was_busy_counts_as_having_been_away() -> None:
    """It may have lost leases, as it has without its file of commands."""

    async def wait() -> None:
        with tempfile.TemporaryDirectory(prefix="meshloom-redis-") as name:
            folder = Path(name)
            async with contextlib.AsyncExitStack() as stack:
                with EmbeddedRedis.start(folder) as before:
                    ports = await stack.enter_async_context(redis_ports(before.url))
                    waker = await stack.enter_async_context(ports.listen())
                with EmbeddedRedis.start(folder):
                    with pytest.raises(StoreUnavailableError):
                        await waker.wait(60)
                    await stack.aclose()

    asyncio.run(wait())


@pytest.mark.redis
def test_a_stream_beyond_the_limit_is_told_to_come_back(quiet_plane: ControlPlane) -> None:
    job_id = quiet_plane.submit()
    quiet_plane.act(job_id, "cancel")
    context: Context = quiet_plane.client.app.state.context  # type: ignore[attr-defined] # FastAPI's
    limit = context.streams.free
    for path in (f"/v1/jobs/{job_id}/events", f"/v1/jobs/{job_id}/logs"):
        context.streams.free = 0
        refused = quiet_plane.client.get(path, headers=STREAM)
        assert (refused.status_code, refused.json()["code"]) == (503, "too_many_streams")
        assert refused.headers["retry-after"] == "5"
        assert quiet_plane.client.get(path).status_code == 200
        context.streams.free = limit
        assert quiet_plane.client.get(path, headers=STREAM).status_code == 200
        expired = quiet_plane.client.get("/v1/jobs/job_nope/events", headers=STREAM)
        assert expired.status_code == 404
        assert context.streams.free == limit
