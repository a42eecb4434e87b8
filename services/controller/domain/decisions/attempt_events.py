"""What placement, agents and nodes do to a job's newest attempt.

A fact of an older attempt is void, and so is a repeated one: handlers change nothing then.
"""

import math
from collections.abc import Sequence
from typing import Final

from services.contract.api.views import Evaluation
from services.contract.messages.commands import (
    CommitCheckpoint,
    LaunchGang,
    LoadCheckpoint,
    StopGang,
)
from services.contract.messages.facts import (
    AGENT_DIED,
    OLDER_COPY,
    Evaluated,
    GangDiagnosed,
    GangEnded,
    GangLaunched,
    GangProgressed,
    LaunchLoads,
    LaunchRefused,
)
from services.contract.words.states import CheckpointState, JobState
from services.controller.domain.decisions import diagnose, replicas
from services.controller.domain.decisions.attempt_end import settle
from services.controller.domain.job import checkpoint as checkpoints
from services.controller.domain.job.attempt import ATTEMPTS_KEPT, Attempt, NodeExit, NodeFindings
from services.controller.domain.job.checkpoint import Checkpoint
from services.controller.domain.job.effects import Draft
from services.controller.domain.job.events import (
    AnswerOverdue,
    ClockSetBack,
    GangPlaced,
    NodeLost,
    PlacementDelayed,
    RanksSeen,
)
from services.controller.domain.job.job import WAITING_STATES, Job

ANSWER_DUE_MS: Final = 15_000
RESENT_MOST: Final = 20
"""So often is a command sent again that an agent whose lease lives does not answer: 5 minutes."""
# A rank can vote faster than its chain grows, for as long as it lives: each commit is a command that waits, and is
# sent again.
COMMITS_AT_ONCE: Final = 16
_EVALUATIONS_KEPT: Final = 500
_NOTICES_KEPT: Final = 8
_STARTING_STATES: Final = frozenset({JobState.PLACING, JobState.STARTING})


def on_placed(event: GangPlaced, draft: Draft) -> None:
    """Open the next attempt and command its launch."""
    job = draft.job
    if job.state not in WAITING_STATES or job.planning is not None:
        return
    if job.has_lost_its_checkpoints:
        draft.transition(JobState.PAUSED, "every checkpoint to resume from is corrupt", stop=None)
        return
    fence = job.fence + 1
    source = job.resume_point
    attempt = Attempt(
        fence=fence,
        world_size=event.plan.world_size,
        mesh=event.plan.sharding.mesh,
        incarnations=dict(event.incarnations),
        resumed_from=source.checkpoint_id,
        resumed_step=source.step,
        started_ms=draft.now_ms,
        last_step=source.step,
        replicas=replicas.book_of(job, event.plan),
    )
    if job.attempts and job.attempts[-1].world_size != attempt.world_size:
        _note_resize(draft, job.attempts[-1], attempt.world_size)
    nodes = ", ".join(event.incarnations)
    _append(draft, attempt)
    draft.change(plan=event.plan, fence=fence)
    draft.transition(
        JobState.PLACING,
        f"attempt {fence}: {event.plan.world_size} {event.plan.device_type} ranks on {nodes}, "
        f"{source.words}",
        started_ms=draft.now_ms if job.started_ms is None else job.started_ms,
    )
    head = event.plan.ranks[0].node_id
    _launch(draft, [head])
    if source.checkpoint_id is not None:
        # They are commanded to launch once rank 0 listens, which then would wait for what they load.
        others = [node for node in event.incarnations if node != head]
        load = LoadCheckpoint(job_id=job.id, fence=fence, checkpoint_id=source.checkpoint_id)
        draft.send(load, others)


def _append(draft: Draft, attempt: Attempt) -> None:
    """Add an attempt; the record, which is written as a whole, keeps the first and the newest."""
    first, later = (*draft.job.attempts, attempt)[:1], (*draft.job.attempts, attempt)[1:]
    surplus = max(len(later) - ATTEMPTS_KEPT, 0)
    left_out = draft.job.attempts_left_out + surplus
    draft.change(attempts=(*first, *later[surplus:]), attempts_left_out=left_out)


def on_delayed(event: PlacementDelayed, draft: Draft) -> None:
    """Say why the job still waits."""
    if draft.job.state not in WAITING_STATES:
        return
    if draft.job.reason != event.reason:
        draft.change(reason=event.reason)
        draft.note("job.waiting", event.reason)
    draft.change(waiting_fence=draft.job.fence)


def on_launched(fact: GangLaunched, draft: Draft) -> None:
    """Its ranks live; once they do on all nodes, the attempt is starting.

    The node of rank 0 comes first: the others are told where it listens.
    """
    attempt = draft.job.attempt
    if attempt is None or fact.node_id in attempt.launched or attempt.is_over:
        return
    answered(draft)
    launched = (*attempt.launched, fact.node_id)
    # Older agents name none.
    told = {fact.node_id: fact.addresses} if fact.addresses else {}
    addresses = {**attempt.addresses, **told}
    draft.change_attempt(launched=launched, store=attempt.store or fact.store, addresses=addresses)
    if attempt.store is None and not attempt.has_failed and draft.job.stop is None:
        _launch(draft, [n for n in attempt.live_nodes if n not in launched])
    if draft.job.state == JobState.PLACING and len(launched) == len(attempt.incarnations):
        draft.transition(JobState.STARTING, f"attempt {attempt.fence}: all ranks are launched")


def on_loads(fact: LaunchLoads, draft: Draft) -> None:
    """A node loads the checkpoint from the bucket, and launches its ranks then: it is waited for as long as bytes come."""
    attempt = draft.job.attempt
    if attempt is None or attempt.has_failed or draft.job.stop is not None:
        return
    if draft.job.state != JobState.PLACING or fact.node_id not in attempt.live_nodes:
        return
    answered(draft)
    loaded, total = (count / 1e9 for count in (fact.bytes, fact.of))
    draft.change(
        reason=f"attempt {attempt.fence}: {fact.node_id} loads the checkpoint, {loaded:.1f} of {total:.1f} GB"
    )


def on_refused(fact: LaunchRefused, draft: Draft) -> None:
    """A node could not start its part: the others' parts are stopped."""
    attempt = draft.job.attempt
    if attempt is not None and fact.node_id in attempt.live_nodes:
        _refused(draft, attempt, fact.node_id, fact.reason, fact.condition)


def _refused(
    draft: Draft, attempt: Attempt, node_id: str, reason: str, condition: str | None
) -> None:
    # Once it has failed or is to stop, a node refuses because of that: it is not the cause.
    if not attempt.has_failed and draft.job.stop is None:
        refusal = f"{node_id} could not launch its ranks: {reason}"
        draft.change_attempt(refusal=refusal, condition=condition)
    draft.change_attempt(ended_nodes=(*attempt.ended_nodes, node_id))
    _kill_rest(draft)
    settle(draft)


def on_progressed(fact: GangProgressed, draft: Draft) -> None:
    """The first step of the attempt is done; step 0: a script runs, and may never tell of steps."""
    attempt = draft.job.attempt
    if attempt is None or attempt.is_over:
        return
    if attempt.first_step is None and fact.step:
        draft.change_attempt(
            first_step=fact.step,
            first_step_ms=draft.now_ms,
            last_step=max(attempt.last_step, fact.step),
        )
    if fact.throughput_unit is not None and fact.loss_unit is not None:
        draft.change(throughput_unit=fact.throughput_unit, loss_unit=fact.loss_unit)
    if draft.job.state in _STARTING_STATES:
        script = draft.job.spec.entrypoint
        does = "is training" if script is None else f"runs {script.what}"
        draft.transition(JobState.RUNNING, f"attempt {attempt.fence} {does}")
    _take_notices(draft, attempt, fact.notices)


def _take_notices(draft: Draft, attempt: Attempt, notices: Sequence[str]) -> None:
    # The agents of all nodes tell them, and ranks may say anything any number of times.
    news = [notice for notice in notices if notice not in attempt.notices]
    news = news[: _NOTICES_KEPT - len(attempt.notices)]
    if not news:
        return
    draft.change_attempt(notices=(*attempt.notices, *news))
    if draft.job.state == JobState.RUNNING:
        draft.change(reason="; ".join([draft.job.reason or "", *news]))
    for notice in news:
        draft.note("attempt.notice", notice, fence=attempt.fence)


def on_ended(fact: GangEnded, draft: Draft) -> None:
    """No rank lives on this node any more."""
    attempt = draft.job.attempt
    if attempt is None or fact.node_id not in attempt.live_nodes:
        return
    answered(draft)
    replicas.leave_behind(draft, fact.exits)
    attempt = draft.job.attempts[-1]
    book = attempt.replicas
    counting = [gone for gone in fact.exits if book is None or book.has(gone.rank)]
    ended_well = all(gone.finished or gone.drained for gone in counting)
    agent_died = any(gone.error == AGENT_DIED for gone in counting)
    if not ended_well and fact.node_id not in attempt.launched and not agent_died:
        # Of its own ranks the launch would have been told first, but by an agent that died while it launched them.
        reason = f"it had an attempt {attempt.fence} before, which has ended"
        _refused(draft, attempt, fact.node_id, reason, OLDER_COPY)
        return
    if not ended_well and replicas.survives(draft, fact.node_id):
        replicas.lose_node(draft, fact.node_id, f"the ranks on {fact.node_id} ended")
        draft.change_attempt(ended_nodes=(*attempt.ended_nodes, fact.node_id))
        return
    exits = tuple(NodeExit(node_id=fact.node_id, exit=gone) for gone in counting)
    hang = () if fact.hang is None else (NodeFindings(node_id=fact.node_id, findings=fact.hang),)
    draft.change_attempt(
        ended_nodes=(*attempt.ended_nodes, fact.node_id),
        exits=Attempt.exits_kept(attempt.exits + exits),
        last_step=max(attempt.last_step, fact.last_step),
        hang=Attempt.findings_kept(attempt.hang + hang),
        oom_kills=attempt.oom_kills + fact.oom_kills,
    )
    if ended_well:
        _kill(draft, replicas.idle_nodes(draft))
    else:
        if fact.first_exit_s is not None and attempt.failed_ms is None:
            draft.change_attempt(failed_ms=draft.now_ms - int(fact.first_exit_s * 1000))
        _kill_rest(draft, look=fact.hang is not None)
    settle(draft)


def on_diagnosed(fact: GangDiagnosed, draft: Draft) -> None:
    """An agent looked into the ranks of its node because somebody asked."""
    attempt = draft.job.attempt
    if attempt is None:
        return
    look = NodeFindings(node_id=fact.node_id, findings=fact.findings)
    if look in attempt.looks:
        return
    looks = (*(known for known in attempt.looks if known.node_id != fact.node_id), look)
    found = diagnose.of_findings(looks, attempt.world_size, attempt.addresses)
    found = found.model_copy(update={"live": True, "at_ms": draft.now_ms})
    draft.change_attempt(diagnosis=found, looks=Attempt.findings_kept(looks))
    if len(looks) == len(attempt.live_nodes):
        draft.note("job.diagnosed", found.summary, verdict=found.verdict, rank=found.rank)


def on_node_lost(event: NodeLost, draft: Draft) -> None:
    """A node is gone with the ranks on it, or with the commit for which the job waits."""
    attempt = draft.job.attempt
    if attempt is None or event.node_id not in attempt.incarnations:
        return
    is_waited_for = attempt.is_over and event.node_id == draft.job.head_node
    if event.node_id not in attempt.live_nodes and not is_waited_for:
        return
    if not is_waited_for and replicas.survives(draft, event.node_id):
        # Should it only have been cut off, this is the first it hears.
        _kill(draft, (event.node_id,))
        replicas.lose_node(draft, event.node_id, event.reason)
        draft.change_attempt(
            lost_nodes=(*attempt.lost_nodes, event.node_id),
            last_step=max(attempt.last_step, event.last_step),
        )
        return
    # Sent to the lost node too: should it only have been cut off, this is the first it hears.
    _kill(draft, attempt.live_nodes)
    draft.change_attempt(
        lost=attempt.lost or _why_lost(event),
        lost_nodes=(*attempt.lost_nodes, event.node_id),
        farewell=event.farewell if attempt.lost is None else attempt.farewell,
        failed_ms=event.seen_ms if attempt.failed_ms is None else attempt.failed_ms,
        last_step=max(attempt.last_step, event.last_step),
    )
    settle(draft)


def _why_lost(event: NodeLost) -> str:
    if event.trained_on_s is None:
        return event.reason
    return (
        f"{event.reason}; its ranks took part in steps for {event.trained_on_s:.1f} s after its agent was last heard "
        f"of: {event.node_id} runs, but its agent does not, or the network between {event.node_id} and Redis is down"
    )


def on_evaluated(fact: Evaluated, draft: Draft) -> None:
    """A validation pass; the newest one of a step counts."""
    # A fact that never travelled as JSON may still say NaN, which is not even equal to itself.
    loss = fact.loss if fact.loss is not None and math.isfinite(fact.loss) else None
    evaluation = Evaluation(
        step=fact.step,
        loss=loss,
        tokens=fact.tokens,
        baselines=fact.baselines,
        metrics=fact.metrics,
    )
    if evaluation in draft.job.evaluations:
        return
    others = [e for e in draft.job.evaluations if e.step != fact.step]
    merged = sorted([*others, evaluation], key=lambda e: e.step)
    draft.change(evaluations=tuple(merged[-_EVALUATIONS_KEPT:]))
    draft.note(
        "job.evaluated",
        f"validation loss {'not finite' if loss is None else f'{loss:.4f}'} after step {fact.step}",
        step=fact.step,
        loss=loss,
        baselines=fact.baselines,
    )


def on_overdue(_event: AnswerOverdue, draft: Draft) -> None:
    """Send again what the newest attempt's agents should have answered long ago.

    After ``RESENT_MOST`` times without an answer the attempt ends without these agents. Ranks that
    live there all the same are fenced by the next attempt.
    """
    job, attempt = draft.job, draft.job.attempt
    if attempt is None:
        return
    if attempt.resent >= RESENT_MOST:
        _give_up_waiting(draft, attempt)
        return
    draft.change_attempt(resent=attempt.resent + 1)
    if attempt.has_failed:
        _kill(draft, attempt.live_nodes)
    elif job.state == JobState.PLACING and job.plan is not None:
        head = job.plan.ranks[0].node_id
        nodes = attempt.live_nodes if attempt.store is not None else (head,)
        _launch(draft, [n for n in nodes if n not in attempt.launched])
    if job.stop is not None and attempt.live_nodes:
        draft.send(stop_command(job, attempt, draft.now_ms), attempt.live_nodes)
    # Not the one that waits for its turn: a later one may take its place, and what is given up must not be committed.
    for sealed in sealed_of(job, attempt.fence)[:COMMITS_AT_ONCE]:
        send_commit(draft, attempt.fence, sealed.id)


def on_ranks_seen(event: RanksSeen, draft: Draft) -> None:
    """Ask these nodes alone for the launch of which Redis lost their answers: all nodes of a gang join at once.

    The others are asked when the node of rank 0 has answered. That nobody answers is for ``on_overdue`` to count.
    Once all have launched, one of them: it answers with the first step, too, if that is done, which is told once.
    """
    job, attempt = draft.job, draft.job.attempt
    if attempt is None or job.state not in _STARTING_STATES or attempt.has_failed:
        return
    is_launched = job.state == JobState.STARTING
    waited_for = set(attempt.live_nodes).difference(() if is_launched else attempt.launched)
    if attempt.store is None:
        waited_for.intersection_update({job.head_node})
    seen = [node_id for node_id in event.node_ids if node_id in waited_for]
    _launch(draft, seen[:1] if is_launched else seen)


def on_clock_set_back(event: ClockSetBack, draft: Draft) -> None:
    """Note it; a decision sets the moments of its job back by itself."""
    words = f"the clock of Redis was set back by {event.by_ms / 1000:.0f} s: waiting jobs continue"
    draft.note("clock.set_back", words)


def answered(draft: Draft) -> None:
    """An agent answered: what is sent again is counted from here."""
    if draft.job.attempt is not None and draft.job.attempt.resent:
        draft.change_attempt(resent=0)


def _give_up_waiting(draft: Draft, attempt: Attempt) -> None:
    job = draft.job
    waited_s = RESENT_MOST * ANSWER_DUE_MS // 1000
    silent: tuple[str, ...] = ()
    if attempt.has_failed or job.stop is not None:
        silent = attempt.live_nodes
    elif job.state == JobState.PLACING and job.plan is not None:
        asked = attempt.live_nodes if attempt.store is not None else (job.plan.ranks[0].node_id,)
        silent = tuple(node for node in asked if node not in attempt.launched)
    if attempt.is_over and job.head_node is not None:
        silent = (job.head_node,)
    why = f"{', '.join(silent)} did not answer for {waited_s} s, although the lease is valid"
    draft.change_attempt(resent=0)
    if silent:
        _kill(draft, attempt.live_nodes)
        draft.change_attempt(
            lost=attempt.lost if attempt.has_failed else why,
            lost_nodes=(*attempt.lost_nodes, *silent),
        )
        draft.note("attempt.unanswered", why, fence=attempt.fence)
        settle(draft)
        return
    why = f"{job.head_node} did not say for {waited_s} s whether it is committed"
    for sealed in job.checkpoints.values():
        if sealed.state == CheckpointState.SEALED and sealed.fence == attempt.fence:
            aborted = checkpoints.abort(sealed, why)
            draft.change(checkpoints={**draft.job.checkpoints, sealed.id: aborted})
            draft.note("checkpoint.aborted", f"checkpoint of step {sealed.step}: {why}")


def is_overdue(job: Job, now_ms: int) -> bool:
    """Whether an agent should have answered the last command by now."""
    attempt = job.attempt
    if attempt is None:
        return False
    awaits_commit = any(
        c.state == CheckpointState.SEALED and c.fence == attempt.fence
        for c in job.checkpoints.values()
    )
    # Once the grace is over, an agent has no more of it for the command that is sent again.
    since_ms = job.commanded_ms
    if job.stop is not None:
        since_ms = max(since_ms, job.stop.asked_ms + int(job.stop.grace_s * 1000))
    awaits_end = job.stop is not None or (attempt.has_failed and bool(attempt.live_nodes))
    awaits_answer = awaits_commit or job.state == JobState.PLACING or awaits_end
    return awaits_answer and now_ms - since_ms > ANSWER_DUE_MS


def sealed_of(job: Job, fence: int) -> list[Checkpoint]:
    """Those of an attempt whose commit is not answered, by step."""
    found = job.checkpoints.values()
    return sorted(
        (c for c in found if (c.state, c.fence) == (CheckpointState.SEALED, fence)),
        key=lambda c: c.step,
    )


def send_commit(draft: Draft, fence: int, checkpoint_id: str) -> None:
    """Command the head node to link a sealed checkpoint's manifest."""
    manifest = draft.job.checkpoints[checkpoint_id].manifest
    if draft.job.head_node is not None:
        command = CommitCheckpoint(job_id=draft.job.id, fence=fence, manifest=manifest)
        draft.send(command, [draft.job.head_node])


def stop_command(job: Job, attempt: Attempt, now_ms: int) -> StopGang:
    """The command that carries the job's request to stop; grace is what is left of it, in seconds."""
    stop = job.stop
    if stop is None or stop.kind == "kill":
        return StopGang(job_id=job.id, fence=attempt.fence, mode="kill")
    left = max(stop.grace_s - (now_ms - stop.asked_ms) / 1000, 0.0)
    return StopGang(
        job_id=job.id,
        fence=attempt.fence,
        mode="drain",
        checkpoint=stop.checkpoint,
        grace_s=left,
    )


def _note_resize(draft: Draft, before: Attempt, ranks: int) -> None:
    why = before.exit_reason
    draft.note(
        "job.resized",
        f"from {before.world_size} to {ranks} ranks, after attempt {before.fence} ended: {why}",
        before=before.world_size,
        after=ranks,
        cause=why,
    )


def _launch(draft: Draft, nodes: Sequence[str]) -> None:
    """Command these nodes to launch their ranks of the newest attempt."""
    job, attempt = draft.job, draft.job.attempts[-1]
    if job.plan is None or not nodes:
        return
    head = job.plan.ranks[0].node_id
    for node in nodes:
        command = LaunchGang(
            job_id=job.id,
            fence=attempt.fence,
            spec=job.spec,
            plan=job.plan,
            resume_from=attempt.resumed_from,
            store=None if node == head else attempt.store,
            owner=job.owner,
            created_ms=job.created_ms,
        )
        draft.send(command, [node])


def _kill_rest(draft: Draft, *, look: bool = False) -> None:
    attempt = draft.job.attempt
    if attempt is not None:
        _kill(draft, attempt.live_nodes, look=look)


def _kill(draft: Draft, nodes: tuple[str, ...], *, look: bool = False) -> None:
    if nodes:
        fence = draft.job.attempts[-1].fence
        draft.send(StopGang(job_id=draft.job.id, fence=fence, mode="kill", look=look), nodes)
