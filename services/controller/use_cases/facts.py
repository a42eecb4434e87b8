"""What the controller does with the facts of agents."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import structlog
from pydantic import ValidationError

from services.contract.messages.commands import StopGang
from services.contract.messages.facts import (
    FACT,
    CheckpointCorrupt,
    CheckpointLinked,
    Fact,
    GangDiagnosed,
    GangEnded,
    JobFound,
    JobPurged,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    RecordsClosed,
)
from services.contract.messages.findings import Findings
from services.contract.messages.probing import ModelProbed, NodeMeasured
from services.contract.messages.telemetry import RankStacks
from services.contract.system.long_work import uncollected
from services.contract.words.ids import job_of_checkpoint
from services.contract.words.states import NodeState
from services.controller.domain.decisions.dispatch import was_told_to_load
from services.controller.domain.decisions.history import Occurrence
from services.controller.domain.decisions.purge import is_purged
from services.controller.domain.decisions.recovery import awaits_adoption
from services.controller.domain.errors import NotFoundError, RecordUnreadableError
from services.controller.domain.job.effects import Send
from services.controller.domain.job.events import GangFact, NodeLost, RanksSeen
from services.controller.domain.job.job import Job
from services.controller.domain.scheduling import node as nodes
from services.controller.domain.scheduling.node import Node
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Actor, Stored
from services.controller.ports.machines import FactEntry
from services.controller.use_cases.change import apply_events
from services.controller.use_cases.clone import delete_with_holds, let_go_of_origin
from services.controller.use_cases.last_seen import last_seen
from services.controller.use_cases.recovery import recover_job

_log = structlog.get_logger()
_FAULTS_TOLD = 100
_MOST_PARTS = 1 << 20
_LONGEST_WORD = 2_000
_ALONE = JobFound | NodeLeaving | NodeLeft | ModelProbed | NodeMeasured | RecordsClosed


@dataclass(frozen=True)
class ReceivedFact:
    """A fact, where it stood in the queue, and when it was told."""

    fact: Fact
    entry: FactEntry
    time_ms: int


async def apply_facts(ports: Ports, entries: Sequence[FactEntry], epoch: int) -> None:
    """Act on facts in their order; those of one job are committed together.

    So a job with many facts costs the others one commit a batch. Facts are delivered at least once:
    acting on one again changes nothing.

    Raises:
        DeposedError: ``epoch`` is over; the facts are the next leader's.
    """
    # Ids of a stream grow even if its clock was set back: no fact is of the future.
    now_ms = await ports.clock.now_ms()
    told = [t for t in (_parse(entry, now_ms) for entry in entries) if t is not None]
    for group in _by_addressee(told):
        joins = [(one.fact, one.entry.id) for one in group if isinstance(one.fact, NodeJoined)]
        if joins:
            await _take_in(ports, joins, epoch)
        elif isinstance(group[0].fact, NodeLeaving | NodeLeft):
            await _let_leave(ports, group[0].fact, group[0].entry.id, epoch)
        elif isinstance(group[0].fact, JobFound):
            await recover_job(ports, group[0].fact, group[0].time_ms, epoch)
        elif isinstance(group[0].fact, ModelProbed | NodeMeasured | RecordsClosed):
            await _keep_answer(ports, group[0], epoch)
        else:
            await _apply_gang_facts(ports, group, epoch)


def _by_addressee(told: Iterable[ReceivedFact]) -> Iterator[list[ReceivedFact]]:
    """Each addressee's facts in their order; those of jobs do not pass what is told of nodes.

    Joins that follow each other are one group: after a restart of Redis all agents join at once.
    """
    for is_of_jobs, row in itertools.groupby(told, key=lambda one: _addressee(one)[0] == "job"):
        if not is_of_jobs:
            yield from (list(group) for _, group in itertools.groupby(row, key=_addressee))
            continue
        jobs: dict[tuple[str, str], list[ReceivedFact]] = {}
        for one in row:
            jobs.setdefault(_addressee(one), []).append(one)
        yield from jobs.values()


def _parse(entry: FactEntry, now_ms: int) -> ReceivedFact | None:
    # Whatever is checked of a part, all that stands in it is made first: millions of lists take seconds.
    parts = entry.body.count("[") + entry.body.count("{")
    if parts > _MOST_PARTS:
        error = f"{parts} parts"
        _log.error("unreadable_fact", fact_id=entry.id, body=entry.body[:500], error=error)
        return None
    try:
        with uncollected():
            fact = FACT.validate_json(entry.body)
    except ValidationError as error:
        # It will not become readable by waiting: said once, and passed over.
        _log.error("unreadable_fact", fact_id=entry.id, body=entry.body[:500], error=_said(error))
        return None
    if entry.sender not in {fact.node_id, None}:
        names = {"sender": entry.sender, "node_id": fact.node_id}
        _log.error("fact_of_another_node", fact_id=entry.id, kind=fact.kind, **names)
        return None
    return ReceivedFact(fact, entry, min(entry.time_ms, now_ms))


def _said(error: ValidationError) -> str:
    # To write down a million faults takes longer than the lead is held.
    count = error.error_count()
    return f"{count} faults" if count > _FAULTS_TOLD else str(error)[:_LONGEST_WORD]


def _addressee(told: ReceivedFact) -> tuple[str, str]:
    fact = told.fact
    if isinstance(fact, NodeJoined):
        return ("joins", "")
    if isinstance(fact, _ALONE):
        return ("alone", told.entry.id)
    return ("job", fact.job_id)


async def _keep_answer(ports: Ports, told: ReceivedFact, epoch: int) -> None:
    """Keep what a node found out; whoever plans looks at it. Told again it is the same."""
    fact = told.fact
    if isinstance(fact, ModelProbed):
        if not await ports.plans.keep_answer(fact, epoch):
            _log.warning("answer_of_unasked_node", probe_id=fact.probe_id, node_id=fact.node_id)
            return
        why = None if fact.failure is None else fact.failure.code
        _log.info("model_probed", probe_id=fact.probe_id, took_s=fact.took_s, failure=why)
    elif isinstance(fact, NodeMeasured):
        # Of names that are no node's any number could be kept.
        if await ports.nodes.node(fact.node_id) is None:
            _log.warning("measurement_of_unknown_node", node_id=fact.node_id)
            return
        found = nodes.measurement(fact, told.time_ms)
        await ports.nodes.keep_measured(fact.node_id, fact.device_type, found, epoch)
        _log.info("node_measured", node_id=fact.node_id, device_type=fact.device_type)
    elif isinstance(fact, RecordsClosed):
        await _let_records_go(ports, fact)


async def _let_records_go(ports: Ports, fact: RecordsClosed) -> None:
    """What Redis has of a job's records may go: the node that was told to says that storage has it."""
    try:
        job = (await ports.jobs.load(fact.job_id)).job
    except (NotFoundError, RecordUnreadableError):
        _log.info("fact_of_unknown_job", job_id=fact.job_id)
        return
    if fact.node_id != job.head_node:
        _log.warning("records_closed_elsewhere", job_id=job.id, node_id=fact.node_id)
        return
    await ports.telemetry.closed(fact.job_id, fact.fence, fact.events_to)
    _log.info("records_closed", job_id=fact.job_id, node_id=fact.node_id)


async def _apply_gang_facts(ports: Ports, group: Sequence[ReceivedFact], epoch: int) -> None:
    slim = [(_without_stacks(told.fact), told.time_ms) for told in group]
    occurrences = [Occurrence(fact, ms) for fact, ms in slim if isinstance(fact, GangFact)]
    job_id = getattr(group[0].fact, "job_id", "")
    actor = Actor(f"agent:{getattr(group[0].fact, 'node_id', '')}")
    stacks = [entry for told in group for entry in _stacks(told.fact)]
    job = await _apply(ports, job_id, occurrences, actor, epoch, stacks)
    for one in occurrences:
        # A job that was cloned loads another job's checkpoint, whose index is to know it too.
        # Of one that was found in storage only a node says that it is a clone, and of which checkpoint.
        is_clone = job is not None and job.origin is not None and not job.origin.found
        if isinstance(one.event, CheckpointCorrupt) and job is not None and is_clone:
            owner = job_of_checkpoint(one.event.checkpoint_id)
            if owner != job_id and was_told_to_load(job, one.event):
                await _apply(ports, owner, [one], actor, epoch)


async def _apply(
    ports: Ports,
    job_id: str,
    occurrences: Sequence[Occurrence],
    actor: Actor,
    epoch: int,
    stacks: Sequence[RankStacks] = (),
) -> Job | None:
    """The job after what happened to it; None where there is none any more, or none readable."""
    try:
        stored = await apply_events(ports, job_id, occurrences, actor, epoch)
        job = stored.job
        own = [s for s in stacks if s.fence == job.fence and s.rank in job.ranks_on(s.node_id)]
        await ports.telemetry.keep_stacks(job_id, own)
        if any(isinstance(one.event, CheckpointLinked) for one in occurrences):
            await let_go_of_origin(ports, stored.job, epoch)
        for one in occurrences:
            if isinstance(one.event, JobPurged) and is_purged(stored.job, one.event):
                await delete_with_holds(ports, stored, actor, epoch)
                _log.info("job_purged", job_id=job_id)
                return None
    except NotFoundError:
        _log.info("fact_of_unknown_job", job_id=job_id)
    except RecordUnreadableError:
        _log.warning("fact_of_unreadable_job", job_id=job_id)
    else:
        return stored.job
    return None


def _findings(fact: Fact) -> Findings | None:
    match fact:
        case GangDiagnosed(findings=findings):
            return findings
        case GangEnded(hang=findings):
            return findings
    return None


def _without_stacks(fact: Fact) -> Fact:
    """Stacks are for reading and long: the job's record, which is written often, has none."""
    found = _findings(fact)
    if found is None:
        return fact
    bare = tuple(rank.model_copy(update={"stacks": None}) for rank in found.ranks)
    name = "hang" if isinstance(fact, GangEnded) else "findings"
    return fact.model_copy(update={name: found.model_copy(update={"ranks": bare})})


def _stacks(fact: Fact) -> list[RankStacks]:
    found = _findings(fact)
    if found is None or not isinstance(fact, GangDiagnosed | GangEnded):
        return []
    return [
        # Of a rank that did not answer nothing is kept, in place of what it answered before.
        RankStacks(rank=rank.rank, fence=fact.fence, node_id=fact.node_id, text=rank.stacks or "")
        for rank in found.ranks
    ]


async def _take_in(ports: Ports, joins: Sequence[tuple[NodeJoined, str]], epoch: int) -> None:
    active = _by_node(await ports.jobs.active())
    joined: dict[str, tuple[Node, NodeJoined]] = {}
    for fact, fact_id in joins:
        node = await _remember(ports, fact, fact_id, active, epoch)
        if node is not None:
            joined[node.id] = (node, fact)
    # Again: until the nodes were written attempts could be placed on earlier lives of their agents.
    active = _by_node(await ports.jobs.active())
    for node, fact in joined.values():
        reason = f"the agent of {node.id} was restarted"
        await _lose_gangs(ports, node, active.get(node.id, ()), reason, epoch)
        await _kill_orphans(ports, fact, active.get(node.id, ()), epoch)
    await _ask_again(ports, [fact for _, fact in joined.values()], active, epoch)


async def _remember(
    ports: Ports, fact: NodeJoined, fact_id: str, active: Mapping[str, Sequence[Job]], epoch: int
) -> Node | None:
    """The node that has joined; None where the fact is not the newest of it."""
    known = await ports.nodes.node(fact.node_id)
    lease = (await ports.nodes.leases([fact.node_id])).get(fact.node_id)
    if lease is not None and lease.incarnation != fact.incarnation:
        # It is the node's own agent that holds it, and told of itself before or will.
        _log.warning("joined_without_its_lease", node_id=fact.node_id)
        return None
    node = nodes.join(known, fact, fact_id)
    if node != known:
        # Before the join is remembered: what was told behind it must not be held against it.
        if nodes.is_new_word(known, fact, fact_id):
            await _end_missing(ports, fact, active.get(fact.node_id, ()), epoch)
        await ports.nodes.put(node, epoch, known)
        _log.info("node_joined", node_id=node.id, incarnation=node.incarnation)
    return node if node.fact_id == fact_id else None


async def _let_leave(ports: Ports, fact: NodeLeaving | NodeLeft, fact_id: str, epoch: int) -> None:
    known = await ports.nodes.node(fact.node_id)
    if known is None:
        return
    if isinstance(fact, NodeLeaving):
        node = nodes.set_out(known, fact, fact_id)
    else:
        node = nodes.leave(known, fact, fact_id)
    if node != known:
        await ports.nodes.put(node, epoch, known)
        _log.info("node_left" if node.left else "node_leaving", node_id=node.id)
    if isinstance(fact, NodeLeft) and node.fact_id == fact_id:
        active = _by_node(await ports.jobs.active()).get(node.id, ())
        await _lose_gangs(ports, node, active, f"the agent of {node.id} was stopped", epoch)


def _by_node(active: Iterable[Stored]) -> dict[str, list[Job]]:
    """Active jobs by the nodes that have, or had, ranks of their newest attempts."""
    found: dict[str, list[Job]] = {}
    for job in (stored.job for stored in active):
        for node_id in () if job.attempt is None else job.attempt.incarnations:
            found.setdefault(node_id, []).append(job)
    return found


async def _lose_gangs(
    ports: Ports, node: Node, active: Sequence[Job], reason: str, epoch: int
) -> None:
    """Attempts that ran on the node under an earlier life of its agent, or before it left."""
    for known in (job for job in active if _is_lost(job, node)):
        # A node that joined with this one may have had ranks of it, which changed the job since.
        now = [stored.job for stored in await ports.jobs.several([known.id])]
        for job in (job for job in now if _is_lost(job, node)):
            seen = await last_seen(ports, job, node.id)
            # Of an earlier life nobody knows whether it ended in an orderly way.
            farewell = node.left and _is_of_this_life(job, node)
            lost = NodeLost(node.id, reason, seen.step, seen.seen_ms, farewell=farewell)
            now_ms = await ports.clock.now_ms()
            await apply_events(
                ports, job.id, [Occurrence(lost, now_ms)], Actor(f"agent:{node.id}"), epoch
            )


def _is_lost(job: Job, node: Node) -> bool:
    """Whether an attempt is to run on the node that is of an earlier life of its agent, or none any more."""
    if job.attempt is None or node.id not in job.attempt.live_nodes:
        return False
    return node.state == NodeState.LOST or not _is_of_this_life(job, node)


def _is_of_this_life(job: Job, node: Node) -> bool:
    attempt = job.attempt
    return attempt is not None and attempt.incarnations.get(node.id) == node.incarnation


async def _end_missing(ports: Ports, fact: NodeJoined, active: Sequence[Job], epoch: int) -> None:
    """Ask for the end of gangs that the node launched and, by its own word, has no longer.

    Their end was told and lost. To the command to end them the agent answers with the end that it
    wrote down. One whose launch was not heard of yet may be younger than this word.
    """
    running = {(gang.job_id, gang.fence) for gang in fact.gangs}
    for job in active:
        attempt = job.attempt
        if attempt is None or attempt.incarnations.get(fact.node_id) != fact.incarnation:
            continue
        is_missing = (job.id, attempt.fence) not in running
        if is_missing and fact.node_id in attempt.launched and fact.node_id in attempt.live_nodes:
            _log.warning("gang_is_missing", node_id=fact.node_id, job_id=job.id)
            kill = StopGang(job_id=job.id, fence=attempt.fence, mode="kill")
            await ports.jobs.send((Send(fact.node_id, kill),), epoch)


async def _kill_orphans(ports: Ports, fact: NodeJoined, active: Sequence[Job], epoch: int) -> None:
    """Gangs that live on the node although their attempt is over."""
    current = {(job.id, job.attempt.fence) for job in active if job.attempt is not None}
    for gang in (one for one in fact.gangs if (one.job_id, one.fence) not in current):
        try:
            job = (await ports.jobs.load(gang.job_id)).job
        except NotFoundError:
            # Redis may have lost it; then the same agent tells of it next.
            is_orphan = await ports.jobs.was_deleted(gang.job_id)
        except RecordUnreadableError:
            is_orphan = False  # nobody can tell
        else:
            attempt = job.attempt
            is_current = (
                attempt is not None
                and attempt.fence == gang.fence
                and fact.node_id in attempt.incarnations
            )
            is_orphan = not is_current and not awaits_adoption(job, gang.fence)
        if is_orphan:
            _log.warning("orphan_gang", node_id=fact.node_id, job_id=gang.job_id, fence=gang.fence)
            kill = StopGang(job_id=gang.job_id, fence=gang.fence, mode="kill")
            await ports.jobs.send((Send(fact.node_id, kill),), epoch)


async def _ask_again(
    ports: Ports, joins: Sequence[NodeJoined], active: Mapping[str, Sequence[Job]], epoch: int
) -> None:
    """Whether gangs that live on the nodes are those that they were to launch: an older copy of Redis lost their answers.

    Those would be asked for long after the last command, and of ranks that commit there is one for each checkpoint; that
    a gang trains, which is told once, not at all.
    """
    seen: dict[str, list[str]] = {}
    for fact in joins:
        running = {(gang.job_id, gang.fence) for gang in fact.gangs}
        for job in active.get(fact.node_id, ()):
            attempt = job.attempt
            if attempt is None or attempt.first_step is not None:
                continue
            if (job.id, attempt.fence) in running:
                seen.setdefault(job.id, []).append(fact.node_id)
    for job_id, node_ids in seen.items():
        # Together: each change writes the record of a gang that may be on a thousand nodes.
        found = Occurrence(RanksSeen(tuple(node_ids)), await ports.clock.now_ms())
        await apply_events(ports, job_id, [found], Actor("controller"), epoch)
