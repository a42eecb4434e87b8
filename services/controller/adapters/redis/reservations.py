"""Reservations in Redis."""

from typing import Final, cast

from services.contract.redis import redis_keys as keys
from services.controller.adapters.redis.connection import RedisClients, answering
from services.controller.adapters.redis.machine_scripts import PUT_RESERVATION
from services.controller.domain.errors import DeposedError, StaleWriteError
from services.controller.domain.scheduling.reservations import Reservation

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
        await self._write(reservation.id, reservation.model_dump_json(), epoch, before)

    async def remove(self, reservation: Reservation, epoch: int) -> None:
        """See ``ReservationStore.remove``."""
        await self._write(reservation.id, _NONE, epoch, reservation)

    async def _write(self, name: str, text: str, epoch: int, before: Reservation | None) -> None:
        state = _NONE if before is None else before.state.value
        with answering():
            status = await self._put(
                keys=[keys.EPOCH, keys.RESERVATIONS],
                args=[epoch, name, text, state, keys.WAKE],
            )
        if status == "deposed":
            raise DeposedError("another controller leads now")
        if status == "stale":
            raise StaleWriteError(f"reservation {name} changed meanwhile")
