"""Reservations in Redis."""

from typing import Final, cast

from services.contract.redis import redis_keys as keys
from services.controller.adapters.redis.connection import RedisClients, answering
from services.controller.adapters.redis.machine_scripts import PUT_RESERVATION
from services.controller.domain.errors import DeposedError, StaleWriteError
from services.controller.domain.scheduling.reservations import Reservation
from services.controller.ports.pools import ENDED_KEPT

_NONE: Final = ""


class RedisReservations:
    """The port ``ReservationStore``."""

    def __init__(self, clients: RedisClients) -> None:
        self._clients = clients
        self._put = clients.script(PUT_RESERVATION)

    async def reservations(self) -> list[Reservation]:
        """See ``ReservationStore.reservations``."""
        with self._clients.answering(keys.RESERVATIONS):
            rows = cast("dict[str, str]", await self._clients.reads.hgetall(keys.RESERVATIONS))
        read = self._clients.unreadable.read
        found = (
            read(f"{keys.RESERVATIONS} {name}", Reservation.model_validate_json, rows[name])
            for name in sorted(rows)
        )
        return [each for each in found if each is not None]

    async def put(self, reservation: Reservation, epoch: int, before: Reservation | None) -> None:
        """See ``ReservationStore.put``."""
        await self._write(reservation, epoch, before)

    async def ended(self) -> list[Reservation]:
        """See ``ReservationStore.ended``."""
        key = keys.ENDED_RESERVATIONS
        with self._clients.answering(key):
            rows = cast("list[str]", await self._clients.reads.lrange(key, 0, ENDED_KEPT - 1))
        read = self._clients.unreadable.read
        found = (
            read(f"{key} {place}", Reservation.model_validate_json, row)
            for place, row in enumerate(rows)
        )
        return [each for each in found if each is not None]

    async def end(self, reservation: Reservation, now_ms: int, epoch: int) -> None:
        """See ``ReservationStore.end``."""
        await self._write(reservation.ended(now_ms), epoch, reservation, ENDED_KEPT)

    async def _write(
        self,
        reservation: Reservation,
        epoch: int,
        before: Reservation | None,
        ended_kept: int | str = _NONE,
    ) -> None:
        state = _NONE if before is None else before.state.value
        text = reservation.model_dump_json()
        with answering():
            status = await self._put(
                keys=[keys.EPOCH, keys.RESERVATIONS, keys.ENDED_RESERVATIONS],
                args=[epoch, reservation.id, text, state, keys.WAKE, ended_kept],
            )
        if status == "deposed":
            raise DeposedError("another controller leads now")
        if status == "stale":
            raise StaleWriteError(f"reservation {reservation.id} changed meanwhile")
