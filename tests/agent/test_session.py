"""When an agent beats, on an event loop whose time passes as soon as nothing else is to be done."""

import asyncio
import selectors
from collections.abc import Mapping
from types import SimpleNamespace
from typing import cast

import pytest
from redis.exceptions import TimeoutError as NoAnswerError

from services.contract.messages.facts import Inventory
from services.contract.redis import redis_keys
from services.worker.agent.session import Life, Session
from services.worker.agent.streams.redis_clients import ANSWER_WITHIN_S, writing_client
from services.worker.agent.supervisor import Supervisor
from services.worker.agent.telemetry.beat import Beat, BeatAnswer

LEASE_S = redis_keys.NODE_LEASE_MS / 1000


class InstantSelector(selectors.SelectSelector):
    """Waits for nothing: the time that would have been waited has passed."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found and timeout is not None:
            self.passed_s += timeout
        return found


class InstantLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._instant = InstantSelector()
        super().__init__(self._instant)

    def time(self) -> float:
        return self._instant.passed_s


class SilentRedis:
    """Answers the first beat, then none."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    async def write(self, *_: object) -> BeatAnswer:
        loop = asyncio.get_running_loop()
        self.asked.append(loop.time())
        if len(self.asked) == 1:
            return BeatAnswer()
        if len(self.asked) == 5:
            raise asyncio.CancelledError
        await asyncio.sleep(ANSWER_WITHIN_S)
        raise NoAnswerError("no answer")

    async def write_metrics(self, _: object) -> Mapping[object, str]:
        return {}


@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "busy"])
def test_a_third_beat_is_sent_well_before_the_lease_ends_if_two_get_no_answer(
    is_idle: bool,  # noqa: FBT001 parametrized
) -> None:
    redis = SilentRedis()

    async def beat() -> None:
        supervisor = SimpleNamespace(
            urgent=asyncio.Event(),
            is_idle=is_idle,
            take_records=list,
            samples=dict,
            fence_off=lambda _: None,
            records_written=lambda **_: None,
        )
        async with writing_client("redis://nowhere") as client:
            session = Session(
                client,
                Life(
                    "node",
                    "life",
                    Inventory(hostname="a", cpu_slots=1, cpu_count=1, memory_bytes=1),
                ),
                cast("Supervisor", supervisor),
                lambda _: None,
                journal=None,  # type: ignore[arg-type]  # there are no records
            )
            session._beat = cast("Beat", redis)
            await session.run()

    with asyncio.Runner(loop_factory=InstantLoop) as runner, pytest.raises(asyncio.CancelledError):
        runner.run(beat())
    first, _, _, third, _ = redis.asked
    assert third - first < LEASE_S - 0.5
