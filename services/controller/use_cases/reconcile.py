"""One look at everything: what should happen by now and has not."""

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import structlog

from services.contract.words.states import CheckpointState, NodeState
from services.controller.domain.decisions import tracing
from services.controller.domain.decisions.attempt_events import is_overdue
from services.controller.domain.decisions.history import Occurrence
from services.controller.domain.errors import (
    DeposedError,
    InvalidRequestError,
    NotFoundError,
    RecordUnreadableError,
    StaleWriteError,
    StoreUnavailableError,
)
from services.controller.domain.job.events import (
    AnswerOverdue,
    ClockSetBack,
    GangPlaced,
    JobEvent,
    MoveAsked,
    NodeLost,
    PlacementDelayed,
    TraceOverdue,
)
from services.controller.domain.job.job import Job
from services.controller.domain.plans import default_plan
from services.controller.domain.scheduling import node as nodes
from services.controller.domain.scheduling.elastic import (
    GrowthDelay,
    GrowthOption,
    followed,
    growth,
    shrinkage,
)
from services.controller.domain.scheduling.node import Lease, Node, Watch
from services.controller.domain.scheduling.placement import Placed
from services.controller.domain.scheduling.queue import (
    PREEMPTION_GRACE_S,
    Preempt,
    Waiting,
)
from services.controller.domain.scheduling.reservations import Want, reserved_nodes
from services.controller.domain.scheduling.survey import Snapshot, Survey, next_due
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Actor
from services.controller.use_cases.change import apply_events
from services.controller.use_cases.last_seen import last_seen
from services.controller.use_cases.outlook import estimate
from services.controller.use_cases.provision import Provisioning, World, wants_of
from services.controller.use_cases.waiting import reservations_now, survey

_log = structlog.get_logger()
_ACTOR: Final = Actor("controller")
_LONGEST_REST_S: Final = 1.0
_SHORTEST_REST_S: Final = 0.01
_LONG_MS: Final = 1 << 62
_GROWTH_DELAY: Final = GrowthDelay()
# Each is a record to write, which takes a hundredth of a second: who waits meanwhile is looked at in the next look.
_MOVED_A_LOOK: Final = 50


class Reconciler:
    """The reconciler of one term.

    Args:
        ports: The world.
        epoch: The term in whose name it acts.
        growth_delay: What elastic jobs wait for before they grow.
    """

    def __init__(self, ports: Ports, epoch: int, growth_delay: GrowthDelay = _GROWTH_DELAY) -> None:
        self._ports = ports
        self._epoch = epoch
        self._growth_delay = growth_delay
        self._room_since: Mapping[tuple[str, int], int] = {}
        self._survey: Survey | None = None
        self._wants: Sequence[Want] = ()
        self._watch: Watch | None = None
        self._has_more_to_drain = False
        self._pools = Provisioning(ports, epoch)

    def forget_health(self) -> None:
        """Redis was away: leases that ran out meanwhile prove nothing."""
        self._watch = None

    async def watch(self) -> None:
        """See that Redis answers; to be done each second, however long a look takes."""
        self._answered(await self._ports.clock.now_ms())

    async def look(self) -> float:
        """Do all that is due; returns the seconds after which to look again at the latest.

        Raises:
            DeposedError: The term is over.
        """
        now_ms = await self._ports.clock.now_ms()
        healthy_ms = self._answered(now_ms).healthy_ms
        known, leases = await self._judge_nodes(healthy_ms, now_ms)
        reservations = await reservations_now(self._ports)
        jobs = [stored.job for stored in await self._ports.jobs.active()]
        if any(job.rewound(now_ms) is not job for job in jobs):
            # It may have taken seconds to read thousands of jobs, some of which changed meanwhile.
            now_ms = await self._ports.clock.now_ms()
        jobs = [
            await self._set_back(job, now_ms) if job.rewound(now_ms) is not job else job
            for job in jobs
        ]
        unread = await self._alive_but_unread(jobs, known)
        # Thousands may wait, to which none of this can happen: they have no attempt.
        jobs = [
            job if job.attempt is None else await self._look_after(job, known, unread, now_ms)
            for job in jobs
        ]
        world = World(jobs, known, leases, now_ms)
        reservations = await self._pools.review(reservations, world)
        nodes_now, reserved = tuple(known.values()), reserved_nodes(reservations)
        found = await self._serve_queue(Snapshot(tuple(jobs), nodes_now, leases, reserved), now_ms)
        await self._pools.request(reservations, self._wants, world)
        more_grow = await self._grow(found.schedule.growth_options, now_ms)
        await self._forget_nodes(known, leases, jobs, now_ms)
        has_more = self._has_more_to_drain or more_grow
        return _SHORTEST_REST_S if has_more else _rest_s(jobs, now_ms)

    def _answered(self, now_ms: int) -> Watch:
        self._watch = Watch(now_ms, now_ms) if self._watch is None else self._watch.after(now_ms)
        return self._watch

    async def _judge_nodes(
        self, healthy_ms: int, now_ms: int
    ) -> tuple[dict[str, Node], dict[str, Lease]]:
        known = await self._ports.nodes.nodes()
        leases = await self._ports.nodes.leases([node.id for node in known])
        judged: dict[str, Node] = {}
        for node in known:
            judged[node.id] = nodes.judge(node, leases.get(node.id), healthy_ms, now_ms)
            if judged[node.id] != node:
                try:
                    await self._ports.nodes.put(judged[node.id], self._epoch, node)
                except StaleWriteError:  # it has joined or left: judged again at the next look
                    judged[node.id] = node
                else:
                    _log.warning("node_judged", node_id=node.id, state=judged[node.id].state)
        return judged, leases

    async def _look_after(
        self, job: Job, known: dict[str, Node], unread: Mapping[str, Lease], now_ms: int
    ) -> Job:
        """The job after all that is due to its attempt."""
        job = await self._check_attempt(job, known, unread, now_ms)
        job = await self._leave_draining(job, known, now_ms)
        return await self._keep_bounds(job, now_ms)

    async def _set_back(self, job: Job, now_ms: int) -> Job:
        """The job after the clock of Redis was set back."""
        return await self._apply(job, ClockSetBack(job.updated_ms - now_ms), now_ms)

    async def _alive_but_unread(
        self, jobs: Sequence[Job], known: Mapping[str, Node]
    ) -> Mapping[str, Lease]:
        """Leases of nodes that have ranks and whose records cannot be read: they are not lost."""
        busy = {name for job in jobs if job.attempt is not None for name in job.attempt.live_nodes}
        unread = sorted(busy.difference(known))
        return await self._ports.nodes.leases(unread) if unread else {}

    async def _forget_nodes(
        self,
        known: Mapping[str, Node],
        leases: Mapping[str, Lease],
        jobs: Sequence[Job],
        now_ms: int,
    ) -> None:
        """Forget nodes that were lost long ago and on which no job waits."""
        busy = {name for job in jobs if job.attempt for name in job.attempt.incarnations}
        for node in known.values():
            is_needed = node.id in busy or node.id in leases
            if not is_needed and nodes.is_forgettable(node, now_ms):
                with contextlib.suppress(StaleWriteError):
                    await self._ports.nodes.forget(node, self._epoch)
                    _log.info("node_forgotten", node_id=node.id)

    async def _check_attempt(
        self, job: Job, known: dict[str, Node], unread: Mapping[str, Lease], now_ms: int
    ) -> Job:
        """The job after what its nodes and the clock have done to its attempt."""
        for node_id, reason in _losses(job, known):
            lease = unread.get(node_id)
            if lease and job.attempt and lease.incarnation == job.attempt.incarnations[node_id]:
                continue
            seen = await last_seen(self._ports, job, node_id)
            farewell = _has_left(job, known.get(node_id))
            lost = NodeLost(node_id, reason, seen.step, seen.seen_ms, farewell, seen.trained_on_s)
            return await self._apply(job, lost, now_ms)
        if is_overdue(job, now_ms):
            _log.warning("answer_overdue", job_id=job.id, state=job.state)
            job = await self._apply(job, AnswerOverdue(), now_ms)
        elif tracing.is_overdue(job, now_ms):
            job = await self._apply(job, TraceOverdue(), now_ms)
        return job

    async def _leave_draining(self, job: Job, known: dict[str, Node], now_ms: int) -> Job:
        """The job after it was asked to leave a node that is to be empty."""
        attempt = job.attempt
        for node_id in () if attempt is None else attempt.live_nodes:
            drain = known[node_id].emptying if node_id in known else None
            if drain is not None and job.can_migrate:
                words = f"{node_id} is being drained: a checkpoint first, then it moves"
                move = MoveAsked("node_drained", node_id, words, drain.grace_s)
                return await self._apply(job, move, now_ms)
        return job

    async def _keep_bounds(self, job: Job, now_ms: int) -> Job:
        """The job after it was asked to shrink, if it is larger than it may be."""
        move = shrinkage(job)
        return job if move is None else await self._apply(job, move, now_ms)

    async def _grow(self, growth_options: Sequence[GrowthOption], now_ms: int) -> bool:
        """Have some go on with more ranks for which it is time, unless they are nearly done.

        Returns whether there are more.
        """
        self._room_since = followed(self._room_since, growth_options, now_ms)
        due: list[tuple[Job, MoveAsked]] = []
        for option in growth_options:
            since_ms = self._room_since[option.attempt]
            move = growth(option, since_ms, now_ms, self._growth_delay)
            if move is not None:
                due.append((option.job, move))
        left = await estimate(self._ports, [job for job, _ in due], now_ms) if due else {}
        worth = (
            (job, move)
            for job, move in due
            if left.get(job.id, _LONG_MS) > self._growth_delay.stable_ms
        )
        return await self._move_some(worth, now_ms)

    async def _move_some(self, moves: Iterable[tuple[Job, MoveAsked]], now_ms: int) -> bool:
        """Have so many jobs leave their slots as a look may; returns whether there are more."""
        moved = 0
        for job, move in moves:
            if moved == _MOVED_A_LOOK:
                return True
            # One that trips us up does not count: the next look would try it first again.
            moved += (await self._apply(job, move, now_ms)).stop is not None
        return False

    async def _serve_queue(self, snapshot: Snapshot, now_ms: int) -> Survey:
        """Do what is due to those that wait, once for each survey.

        Why the others wait is written down once after an attempt, for their event logs: who asks later
        is told what ``waiting`` works out.
        """
        last = None if self._has_more_to_drain else self._survey
        found = await survey(self._ports, snapshot, now_ms, last)
        if found is last:
            return found
        turns = found.schedule.turns
        if self._ports.pools:
            # As the survey, beside the event loop: two thousand kinds of gangs take seconds on a hundred nodes.
            jobs, usages = snapshot.jobs, snapshot.usages
            self._wants = await asyncio.to_thread(wants_of, jobs, turns, usages)
        # Not before: were that to fail, the next look would take the turns for done.
        self._has_more_to_drain = False
        self._survey = found
        for turn in turns:
            match turn.outcome:
                case Placed() as placed:
                    await self._apply(turn.job, _placed(turn.job, placed), now_ms)
                case Preempt(victims=victims, reason=reason):
                    await self._say_once(turn.job, reason, now_ms)
                    moves = ((victim, _preempted(turn.job, victim)) for victim in victims)
                    if await self._move_some(moves, now_ms):
                        self._has_more_to_drain = True
                case Waiting(reason=reason):
                    await self._say_once(turn.job, reason, now_ms)
        return found

    async def _say_once(self, job: Job, reason: str, now_ms: int) -> None:
        if job.waiting_fence != job.fence:
            await self._apply(job, PlacementDelayed(reason), now_ms)

    async def _apply(self, job: Job, event: JobEvent, now_ms: int) -> Job:
        try:
            stored = await apply_events(
                self._ports, job.id, [Occurrence(event, now_ms)], _ACTOR, self._epoch
            )
        except (StaleWriteError, NotFoundError, RecordUnreadableError):
            return job  # it is looked at again soon, as it is then
        except (StoreUnavailableError, DeposedError):
            raise
        except Exception:  # noqa: BLE001 one job that trips us up must not stop all others
            _log.exception("job_not_reconciled", job_id=job.id, occurrence=type(event).__name__)
            return job
        return stored.job


def _placed(job: Job, placed: Placed) -> GangPlaced | PlacementDelayed:
    try:
        plan = default_plan.gang(job.spec, placed)
    except InvalidRequestError as error:
        # It was accepted by another version of the controller.
        return PlacementDelayed(f"this version cannot plan it: {error}")
    except Exception as error:  # noqa: BLE001 one job that trips us up must not stop all others
        _log.exception("job_not_placed", job_id=job.id)
        return PlacementDelayed(
            f"it cannot be placed: {type(error).__name__}, see the controller's log"
        )
    return GangPlaced(plan, placed.incarnations)


def _preempted(job: Job, victim: Job) -> MoveAsked:
    words = (
        f"preempted by {job.id} of priority {job.spec.priority} (its own is "
        f"{victim.spec.priority}): a checkpoint first, then it waits for slots"
    )
    return MoveAsked("preempted", job.id, words, PREEMPTION_GRACE_S)


def _losses(job: Job, known: dict[str, Node]) -> Iterator[tuple[str, str]]:
    """Nodes on which the attempt can no longer be, or no longer be committed, and why."""
    attempt = job.attempt
    if attempt is None:
        return
    for node_id, incarnation in attempt.incarnations.items():
        node = known.get(node_id)
        lives = node_id in attempt.live_nodes
        is_waited_for = attempt.is_over and node_id == job.head_node and _awaits_commit(job)
        if node is None or node.state == NodeState.LOST:
            if _has_left(job, node) and (lives or is_waited_for):
                yield node_id, f"the agent of {node_id} was stopped"
            elif lives or is_waited_for:
                yield node_id, f"{node_id} is lost: its lease ran out while Redis was healthy"
        elif lives and node.incarnation != incarnation:
            yield node_id, f"the agent of {node_id} was restarted"


def _has_left(job: Job, node: Node | None) -> bool:
    """Whether the very agent that ran the attempt said farewell."""
    if node is None or job.attempt is None or not node.left:
        return False
    return job.attempt.incarnations.get(node.id) == node.incarnation


def _awaits_commit(job: Job) -> bool:
    return any(c.state == CheckpointState.SEALED for c in job.checkpoints.values())


def _rest_s(jobs: Sequence[Job], now_ms: int) -> float:
    due_ms = next_due(jobs, now_ms)
    if due_ms is None:
        return _LONGEST_REST_S
    return min(_LONGEST_REST_S, max((due_ms - now_ms) / 1000, _SHORTEST_REST_S))
