"""What Redis holds, held by one process: the state behind the ports' twins."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from services.contract.messages.commands import COMMAND, Command
from services.contract.messages.probing import DeviceType, ModelProbed
from services.contract.messages.telemetry import MetricRecord, RankSample, RankStacks, StepRecord
from services.controller.domain.access.code import UploadedCode
from services.controller.domain.access.token import Token
from services.controller.domain.access.webhook import Deliveries, Webhook
from services.controller.domain.errors import DeposedError
from services.controller.domain.job.effects import Send
from services.controller.domain.plans.pace import Pace
from services.controller.domain.plans.plan import Plan
from services.controller.domain.scheduling.node import Drain, Lease, Measurement, Node
from services.controller.domain.scheduling.reservations import Reservation
from services.controller.ports.event_feed import FeedEntry
from services.controller.ports.jobs import Claim, Stored
from services.controller.ports.machines import Entry, FactEntry, Log


@dataclass
class MemoryServer:
    """The shared state. ``now_ms`` is its clock, in milliseconds since 1970.

    ``plans``, ``answers`` and ``asked`` say beside each entry when it is forgotten.
    """

    now_ms: Callable[[], int]
    jobs: dict[str, Stored] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    claims: dict[tuple[str, str], tuple[Claim, Stored]] = field(default_factory=dict)
    logs: dict[tuple[str, Log], list[Entry]] = field(default_factory=lambda: defaultdict(list))
    samples: dict[str, dict[int, RankSample]] = field(default_factory=lambda: defaultdict(dict))
    steps: dict[str, list[StepRecord]] = field(default_factory=lambda: defaultdict(list))
    metrics: dict[str, list[MetricRecord]] = field(default_factory=lambda: defaultdict(list))
    stacks: dict[str, dict[int, RankStacks]] = field(default_factory=lambda: defaultdict(dict))
    nodes: dict[str, Node] = field(default_factory=dict)
    drains: dict[str, Drain] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    reservations: dict[str, Reservation] = field(default_factory=dict)
    ended_reservations: list[Reservation] = field(default_factory=list)
    inboxes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    feed: list[FeedEntry] = field(default_factory=list)
    facts: list[FactEntry] = field(default_factory=list)
    delivered: dict[str, FactEntry] = field(default_factory=dict)
    tokens: dict[str, Token] = field(default_factory=dict)
    webhooks: dict[str, Webhook] = field(default_factory=dict)
    deliveries: dict[str, Deliveries] = field(default_factory=dict)
    audit: list[Entry] = field(default_factory=list)
    measured: dict[tuple[str, DeviceType], Measurement] = field(default_factory=dict)
    plans: dict[str, tuple[int, Plan]] = field(default_factory=dict)
    answers: dict[str, tuple[int, ModelProbed]] = field(default_factory=dict)
    paces: dict[str, list[Pace]] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)
    probing_nodes: dict[str, str] = field(default_factory=dict)
    code: dict[str, tuple[UploadedCode, bytes]] = field(default_factory=dict)
    code_used_ms: dict[str, int] = field(default_factory=dict)
    leader: str | None = None
    epoch: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _last_id: tuple[int, int] = (0, 0)

    def entry(self, body: str) -> Entry:
        """A new stream entry: its id grows, as Redis's do."""
        now = self.now_ms()
        time_ms, number = self._last_id
        self._last_id = (now, 0) if now > time_ms else (time_ms, number + 1)
        return Entry(f"{self._last_id[0]}-{self._last_id[1]}", body)

    def tell(self, body: str, sender: str | None = None) -> None:
        """A fact arrives, from the agent of ``sender``."""
        entry = self.entry(body)
        self.facts.append(FactEntry(entry.id, entry.body, sender))

    def refuse_deposed(self, epoch: int | None) -> None:
        """Raise DeposedError unless ``epoch`` is the present one (or None)."""
        if epoch is not None and epoch != self.epoch:
            raise DeposedError("another controller leads now")

    def deliver(self, sends: tuple[Send, ...]) -> None:
        """Put commands into inboxes."""
        for send in sends:
            self.inboxes[send.node_id].append(COMMAND.dump_json(send.command).decode())

    def commands(self, node_id: str) -> list[Command]:
        """What a node's inbox holds."""
        return [COMMAND.validate_json(body) for body in self.inboxes[node_id]]

    async def wake(self) -> None:
        """Tell whoever waits that something changed."""
        async with self.changed:
            self.changed.notify_all()

    async def wait(self, timeout_s: float, is_there: Callable[[], bool]) -> None:
        """Return once ``is_there``, or after ``timeout_s`` seconds."""
        async with self.changed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self.changed.wait_for(is_there)
            except TimeoutError:
                return
