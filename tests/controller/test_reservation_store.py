"""Records of reservations, in Redis and in memory: no leader overwrites what it has not seen."""

import pytest
from redis import Redis

from services.contract.redis import redis_keys as keys
from services.contract.words.states import ReservationState
from services.controller.adapters.redis import redis_ports
from services.controller.domain.errors import DeposedError, StaleWriteError
from services.controller.domain.scheduling.reservations import Reservation
from tests.controller.test_store_contract import World, world

__all__ = ["world"]
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
        await store.remove(asked, epoch)
    with pytest.raises(DeposedError):
        await store.remove(going, epoch - 1)
    assert await store.reservations() == [other, going]
    await store.remove(going, epoch)
    assert await store.reservations() == [other]
    with pytest.raises(StaleWriteError):
        await store.put(going, epoch, going)


async def test_a_record_that_cannot_be_read_costs_itself_alone(redis_url: str) -> None:
    async with redis_ports(redis_url) as ports:
        epoch = await ports.leadership.take("me")
        assert epoch is not None
        await ports.reservations.put(reservation(), epoch, None)
        with Redis.from_url(redis_url) as redis:
            redis.hset(keys.RESERVATIONS, "nodes-0", "{}")
        assert await ports.reservations.reservations() == [reservation()]
        assert list(ports.unreadable()) == [f"{keys.RESERVATIONS} nodes-0"]
