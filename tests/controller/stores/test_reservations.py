"""Records of reservations, in Redis and in memory: no leader overwrites what it has not seen."""

import pytest
from redis import Redis

from services.contract.redis import redis_keys as keys
from services.contract.words.states import ReservationState
from services.controller.adapters.redis import redis_ports
from services.controller.domain.errors import DeposedError, StaleWriteError
from services.controller.domain.scheduling.reservations import Reservation
from services.controller.ports.pools import ENDED_KEPT
from tests.controller.stores.worlds import World

pytestmark = [pytest.mark.anyio, pytest.mark.redis]


def reservation(name: str = "nodes-1", **changes: object) -> Reservation:
    fields: dict[str, object] = {
        "id": name,
        "pool": "burst",
        "node_ids": ("burst-1", "burst-2"),
        "state": ReservationState.REQUESTED,
        "job_id": None,
        "reason": "",
        "requested_ms": 5,
    }
    return Reservation.model_validate(fields | changes)


async def test_a_reservation_is_written_in_place_of_what_was_read(world: World) -> None:
    store = world.ports.reservations
    epoch = await world.ports.leadership.take("me")
    assert epoch is not None
    asked, other = reservation(), reservation("nodes-0")
    await store.put(asked, epoch, None)
    await store.put(other, epoch, None)
    assert await store.reservations() == [other, asked]

    going = asked.released("idle")
    await store.put(going, epoch, asked)
    for stale in (asked, None):
        with pytest.raises(StaleWriteError):
            await store.put(asked.released("late"), epoch, stale)
    with pytest.raises(StaleWriteError):
        await store.end(asked, 9, epoch)
    with pytest.raises(DeposedError):
        await store.end(going, 9, epoch - 1)
    assert (await store.reservations(), await store.ended()) == ([other, going], [])
    await store.end(going, 9, epoch)
    await store.end(other, 10, epoch)
    assert await store.reservations() == []
    assert [(each.id, each.state, each.ended_ms) for each in await store.ended()] == [
        ("nodes-0", ReservationState.RELEASED, 10),
        ("nodes-1", ReservationState.RELEASED, 9),
    ]
    with pytest.raises(StaleWriteError):
        await store.put(going, epoch, going)


async def test_only_the_last_that_ended_are_kept(world: World) -> None:
    store = world.ports.reservations
    epoch = await world.ports.leadership.take("me")
    assert epoch is not None
    for number in range(ENDED_KEPT + 2):
        each = reservation(f"nodes-{number}", is_lost=True)
        await store.put(each, epoch, None)
        await store.end(each, number, epoch)
    kept = await store.ended()
    assert [each.ended_ms for each in kept] == list(range(ENDED_KEPT + 1, 1, -1))
    assert {each.state for each in kept} == {ReservationState.LOST}


async def test_a_record_that_cannot_be_read_costs_itself_alone(redis_url: str) -> None:
    async with redis_ports(redis_url) as ports:
        epoch = await ports.leadership.take("me")
        assert epoch is not None
        await ports.reservations.put(reservation(), epoch, None)
        with Redis.from_url(redis_url) as redis:
            redis.hset(keys.RESERVATIONS, "nodes-0", "{}")
            redis.lpush(keys.ENDED_RESERVATIONS, "{}")
        assert await ports.reservations.reservations() == [reservation()]
        assert await ports.reservations.ended() == []
        assert list(ports.unreadable()) == [
            f"{keys.RESERVATIONS} nodes-0",
            f"{keys.ENDED_RESERVATIONS} 0",
        ]
