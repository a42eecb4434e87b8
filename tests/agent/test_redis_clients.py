"""What is tried again while Redis is away, and how long is waited between the tries."""

import asyncio

import pytest
from redis.exceptions import RedisError
from tenacity import AsyncRetrying, RetryCallState, wait_none

from services.worker.agent.streams import redis_clients
from services.worker.agent.streams.redis_clients import while_away


def test_what_redis_refuses_is_tried_again_until_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redis_clients, "_WAIT", wait_none())
    answers = iter([RedisError("loading"), ConnectionError("refused"), None])
    said: list[str] = []

    async def ask() -> None:
        async for attempt in while_away(said.append):
            with attempt:
                if (error := next(answers)) is not None:
                    raise error

    asyncio.run(ask())
    assert said == ["loading", "refused"]
    assert next(answers, "all taken") == "all taken"


@pytest.mark.parametrize("error", [OSError("disk is full"), asyncio.CancelledError()])
def test_what_is_no_absence_of_redis_is_raised_at_once(error: BaseException) -> None:
    said: list[str] = []

    async def ask() -> None:
        async for attempt in while_away(said.append):
            with attempt:
                raise error

    with pytest.raises(type(error)):
        asyncio.run(ask())
    assert said == []


def test_it_is_given_up_after_its_time_with_the_last_error() -> None:
    async def ask() -> None:
        async for attempt in while_away(lambda _why: None, give_up_s=0.0):
            with attempt:
                raise ConnectionError("refused")

    with pytest.raises(ConnectionError, match="refused"):
        asyncio.run(ask())


def test_agents_wait_random_times_that_grow_to_a_bound() -> None:
    state = RetryCallState(AsyncRetrying(), None, (), {})
    for number, longest_s in ((1, 0.1), (3, 0.4), (30, 1.0)):
        state.attempt_number = number
        waits = {redis_clients._WAIT(state) for _ in range(100)}
        assert len(waits) > 90
        assert 0.05 <= min(waits) <= max(waits) <= longest_s
        assert max(waits) > 0.7 * longest_s
