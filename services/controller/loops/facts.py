"""The fact consumer: handles the agents' facts in their order, and acknowledges after the commit."""

import time
from collections.abc import Sequence
from typing import Final

import structlog

from services.controller.domain.errors import (
    DeposedError,
    RecordTooLongError,
    StaleWriteError,
    StoreUnavailableError,
)
from services.controller.loops.observer import Observer
from services.controller.loops.store_retry import StoreRetry, Troubles
from services.controller.ports.coordination import Ports
from services.controller.ports.machines import FactEntry
from services.controller.use_cases.facts import apply_facts

_log = structlog.get_logger()
_BATCH: Final = 128
_BLOCK_S: Final = 5.0
_LOOK_BACK_EVERY_S: Final = 5.0
_TRIES: Final = 5
_UNOBSERVED: Final = Observer()


class FactLoop:
    """Run ``run`` as a task of a term.

    Args:
        ports: The world.
        epoch: The term.
        troubles: As of ``StoreRetry``.
        observer: Is told how long facts wait.
    """

    def __init__(
        self,
        ports: Ports,
        epoch: int,
        troubles: Troubles | None = None,
        observer: Observer = _UNOBSERVED,
    ) -> None:
        self._observer = observer
        self._ports = ports
        self._troubles = troubles
        self._epoch = epoch
        self._failures: dict[str, int] = {}
        self._looked_back_at: float | None = None

    async def run(self) -> None:
        """Handle facts until cancelled.

        Raises:
            DeposedError: The term is over.
        """
        retry = StoreRetry("facts", self._look_back_soon, self._troubles)
        await retry.round(self._ports.facts.prepare)
        while True:
            await retry.round(self._round)

    async def _round(self) -> None:
        """What was delivered and not acknowledged comes first: it is older than the rest.

        It is looked for at the start, after an error, and now and then: a lost reply leaves its
        facts delivered to nobody.
        """
        last = self._looked_back_at
        if last is None or time.monotonic() - last > _LOOK_BACK_EVERY_S:
            entries = await self._ports.facts.unacknowledged(_BATCH)
            if not entries:
                self._looked_back_at = time.monotonic()
        else:
            entries = await self._ports.facts.next(_BATCH, _BLOCK_S)
        if entries:
            await self._apply(entries)

    async def _apply(self, entries: Sequence[FactEntry]) -> None:
        """Where facts fail together each is handled alone: one that trips us up holds up no other."""
        try:
            await apply_facts(self._ports, entries, self._epoch)
        except (DeposedError, StoreUnavailableError, StaleWriteError):
            self._look_back_soon()
            raise
        except Exception as error:  # noqa: BLE001 a bug in one handler must not stop all jobs
            _log.exception("facts_not_heeded", fact_ids=[entry.id for entry in entries])
            if len(entries) > 1:
                for entry in entries:
                    await self._apply([entry])
                return
            if not self._gives_up(entries[0], error):
                return
        await self._ports.facts.acknowledge([entry.id for entry in entries])
        now_ms = await self._ports.clock.now_ms()
        for entry in entries:
            self._failures.pop(entry.id, None)
            self._observer.fact_handled(max(now_ms - entry.time_ms, 0) / 1000)

    def _gives_up(self, entry: FactEntry, error: Exception) -> bool:
        """Whether a fact failed for the last time: a record that is too long stays so at each try."""
        tries = self._failures.get(entry.id, 0) + 1
        self._failures[entry.id] = tries
        if tries < _TRIES and not isinstance(error, RecordTooLongError):
            return False
        _log.error("fact_given_up", fact_id=entry.id, body=entry.body[:500])
        return True

    def _look_back_soon(self) -> None:
        self._looked_back_at = None
