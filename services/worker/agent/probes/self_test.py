"""What this node's devices do in a second: measured once, kept with the node, told when asked."""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog
from pydantic import BaseModel, ValidationError

from services.contract.messages.facts import Inventory
from services.contract.messages.probe_programs import (
    SELF_TEST_VERSION,
    SelfTestResult,
    SelfTestSeat,
)
from services.contract.messages.probing import DeviceType, MeasureNode, NodeMeasured
from services.contract.system.durable import read_plain, replace_plain
from services.worker.agent.host.folders import NodeFolder
from services.worker.agent.probes.programs import ProgramCall, ProgramEnd, ProgramRunner

_TIMEOUT_S: Final = 120.0
_PROCESSORS: Final = Path("/proc/cpuinfo")
_MEANWHILE: Final = (
    "ranks started on this node meanwhile, and have priority; retry when they have ended"
)
_log = structlog.get_logger()


class NotMeasuredError(Exception):
    """There are no figures; the text says why."""


class _Kept(BaseModel):
    fingerprint: str
    result: SelfTestResult


class SelfTest:
    """Measures the devices of one node.

    Args:
        folder: Where the figures are kept.
        node_id: Whose they are.
        incarnation: The life of the agent that tells them.
        inventory: What the node has; other hardware or versions are measured again.
        runner: Runs the program that measures.
    """

    def __init__(
        self,
        folder: NodeFolder,
        node_id: str,
        incarnation: str,
        inventory: Inventory,
        runner: ProgramRunner,
    ) -> None:
        self._folder = folder
        self._node_id = node_id
        self._incarnation = incarnation
        self._inventory = inventory
        self._runner = runner
        self._running: asyncio.Task[ProgramEnd] | None = None

    async def measure(
        self, command: MeasureNode, ranks_are_here: Callable[[], bool]
    ) -> NodeMeasured:
        """The figures, or why there are none.

        Args:
            command: Of which devices.
            ranks_are_here: Whether there are ranks, which would be disturbed, and disturb.
        """
        device_type = command.device_type
        about = NodeMeasured(
            node_id=self._node_id, incarnation=self._incarnation, device_type=device_type
        )
        try:
            result = await asyncio.to_thread(self._known, device_type)
            if result is None:
                result = await self._measure(device_type, ranks_are_here)
                await asyncio.to_thread(self._keep, device_type, result)
        except NotMeasuredError as error:
            _log.warning("node_not_measured", device_type=device_type, why=str(error))
            return about.model_copy(update={"failure": str(error)})
        return about.model_copy(update={"facts": result.facts, "detail": result.detail})

    def give_way(self) -> None:
        """Ranks are about to start: stop measuring, if it goes on."""
        if self._running is not None:
            self._running.cancel()

    async def _measure(
        self, device_type: DeviceType, ranks_are_here: Callable[[], bool]
    ) -> SelfTestResult:
        inventory = self._inventory
        seats = inventory.cpu_slots if device_type == "cpu" else len(inventory.accelerators)
        if not seats:
            raise NotMeasuredError(f"this node runs no ranks on {device_type}")
        if ranks_are_here():
            raise NotMeasuredError(
                "ranks run on this node, and measuring would disturb them; retry when they have "
                "ended"
            )
        seat = SelfTestSeat(device_type=device_type, seats=seats, processors=inventory.cpu_count)
        call = ProgramCall(
            "services.worker.rank.probe.self_test", f"self-test-{device_type}", seat, _TIMEOUT_S
        )
        self._running = asyncio.create_task(self._runner.ask(call))
        try:
            ended = await self._waited_for(self._running)
        except OSError as error:
            raise NotMeasuredError(f"no process could be started to measure: {error}") from error
        finally:
            self._running = None
        if ranks_are_here():
            raise NotMeasuredError(_MEANWHILE)
        try:
            return SelfTestResult.model_validate_json(ended.answer)
        except ValidationError:
            last = ended.words.splitlines()[-1:]
            raise NotMeasuredError(": ".join((ended.how, *last))) from None

    async def _waited_for(self, running: asyncio.Task[ProgramEnd]) -> ProgramEnd:
        try:
            return await running
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise NotMeasuredError(_MEANWHILE) from None

    def _known(self, device_type: DeviceType) -> SelfTestResult | None:
        try:
            kept = _Kept.model_validate_json(read_plain(self._folder.measured(device_type)))
        except (OSError, ValidationError):
            return None
        return kept.result if kept.fingerprint == self._fingerprint() else None

    def _keep(self, device_type: DeviceType, result: SelfTestResult) -> None:
        kept = _Kept(fingerprint=self._fingerprint(), result=result)
        try:
            replace_plain(
                self._folder.measured(device_type), kept.model_dump_json(indent=1).encode()
            )
        except OSError as error:  # the next one who asks waits a little longer
            _log.warning("figures_not_kept", why=str(error))

    def _fingerprint(self) -> str:
        """Of the hardware and the versions on which the figures depend."""
        known = (str(SELF_TEST_VERSION), self._inventory.model_dump_json(), *_processor_names())
        return hashlib.sha256("\0".join(known).encode()).hexdigest()


def _processor_names() -> list[str]:
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = _PROCESSORS.read_text().splitlines()
    return sorted({line for line in lines if line.startswith("model name")})


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
