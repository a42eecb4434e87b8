"""The proxy does to a real server's bytes what its mode says."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.chaos.proxy import ChaosProxy, Mode

pytestmark = pytest.mark.redis


@pytest.fixture
def proxy(redis_url: str) -> Iterator[ChaosProxy]:
    with ChaosProxy.to(Path(urlsplit(redis_url).path)) as proxy:
        yield proxy


@pytest.fixture
def through(proxy: ChaosProxy, redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis(
        port=proxy.port,
        password=urlsplit(redis_url).password,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=3.0,
    ) as client:
        yield client


def test_it_passes_requests_and_replies(through: redis.Redis) -> None:
    assert through.incr("count") == 1
    assert through.get("count") == b"1"


def test_it_cuts_connections_and_refuses_new_ones_until_it_passes_again(
    proxy: ChaosProxy, through: redis.Redis
) -> None:
    through.ping()
    with proxy.misbehaving(Mode.CUT):
        for _ in range(3):
            with pytest.raises(redis.ConnectionError):
                through.ping()
    assert through.ping()


def test_a_black_hole_swallows_requests_without_an_error(
    proxy: ChaosProxy, through: redis.Redis
) -> None:
    through.ping()
    with proxy.misbehaving(Mode.BLACK_HOLE), pytest.raises(redis.TimeoutError):
        through.incr("count")
    assert through.get("count") is None


def test_a_lost_reply_leaves_a_request_that_was_carried_out(
    proxy: ChaosProxy, through: redis.Redis
) -> None:
    through.ping()
    with proxy.misbehaving(Mode.LOSE_REPLIES), pytest.raises(redis.ConnectionError):
        through.incr("count")
    assert proxy.replies_lost == 1
    assert through.get("count") == b"1"
