"""Jobs that storage told of after Redis had lost them: made anew, and their ranks adopted."""

from services.contract.messages.facts import ChainDamaged, CheckpointLinked, JobFound
from services.contract.states import ExitReason, JobState
from services.controller.domain import checkpoint as checkpoints
from services.controller.domain.attempt import Attempt
from services.controller.domain.checkpoint import LINKED_STATES
from services.controller.domain.commits import on_damaged
from services.controller.domain.effects import Decision, Draft, Note
from services.controller.domain.events import FoundInStorage
from services.controller.domain.job import Job

FOUND_AGAIN = "found again in storage"


def found_again(fact: JobFound, now_ms: int) -> Decision:
    """The job as its card and its commit chain tell of it.

    It stands PAUSED, or has SUCCEEDED if its last step is committed. Its next attempt is numbered
    behind all that opened the chain.
    """
    card = fact.card
    job = Job(
        id=fact.job_id,
        spec=card.spec,
        state=JobState.PAUSED,
        owner=card.owner,
        created_ms=card.created_ms or now_ms,
        updated_ms=now_ms,
        fence=fact.fence,
        run_fence=fact.fence,
    )
    indexed = _with_checkpoints(job, fact, now_ms)
    latest = indexed.latest_checkpoint
    saved = 0 if latest is None else latest.step
    count = len(indexed.checkpoints)
    reason = f"{FOUND_AGAIN}: {count} committed checkpoints, the newest of step {saved}"
    changes: dict[str, object] = {"reason": reason}
    if saved >= card.spec.train.steps:
        changes |= {
            "state": JobState.SUCCEEDED,
            "exit_reason": ExitReason.COMPLETED,
            "ended_ms": now_ms,
        }
    note = Note("job.found_again", reason, {"fence": fact.fence, "node_id": fact.node_id})
    return Decision(indexed.model_copy(update=changes), notes=(note,))


def on_found(event: FoundInStorage, draft: Draft) -> None:
    """What storage tells of a job that is known: checkpoints that the index lacks, live ranks."""
    job, fact = draft.job, event.fact
    draft.change(checkpoints=_with_checkpoints(job, fact, draft.now_ms).checkpoints)
    if fact.fence > job.fence and job.attempt is None:
        draft.change(fence=fact.fence)
    if fact.damaged:
        damage = ChainDamaged(
            job_id=job.id, fence=fact.fence, node_id=fact.node_id, records=fact.damaged
        )
        on_damaged(damage, draft)
    is_ours = job.state == JobState.PAUSED and not job.attempts and job.fence == fact.fence
    nodes = dict.fromkeys(seat.node_id for seat in fact.card.plan.ranks)
    if is_ours and fact.is_running and event.incarnations.keys() >= nodes.keys():
        _adopt(fact, {node: event.incarnations[node] for node in nodes}, draft)


def _adopt(fact: JobFound, incarnations: dict[str, str], draft: Draft) -> None:
    """Its ranks train on: they become the newest attempt's again."""
    card = fact.card
    source = card.resume_from
    resumed_step = 0 if source is None else checkpoints.step_and_fence(source)[0]
    stepped = fact.last_step > resumed_step
    attempt = Attempt(
        fence=fact.fence,
        world_size=card.plan.world_size,
        incarnations=incarnations,
        resumed_from=source,
        resumed_step=resumed_step,
        started_ms=draft.now_ms,
        launched=tuple(incarnations),
        first_step=resumed_step + 1 if stepped else None,
        first_step_ms=draft.now_ms if stepped else None,
        last_step=max(fact.last_step, resumed_step),
    )
    draft.change(
        attempts=(attempt,), plan=card.plan, started_ms=draft.now_ms, run_fence=fact.fence - 1
    )
    draft.move(
        JobState.RUNNING,
        f"{FOUND_AGAIN}: attempt {fact.fence} trains on after step {attempt.last_step}",
    )


def _with_checkpoints(job: Job, fact: JobFound, now_ms: int) -> Job:
    """The job with an index of what its chain commits."""
    book = dict(job.checkpoints)
    for number, manifest in fact.manifests.items():
        known = book.get(manifest.checkpoint_id)
        if manifest.checkpoint_id in job.gone:
            continue
        if known is None or known.state not in LINKED_STATES:
            link = CheckpointLinked(
                job_id=job.id,
                fence=manifest.fence,
                node_id=fact.node_id,
                number=number,
                manifest=manifest,
            )
            book[manifest.checkpoint_id] = checkpoints.commit(known, link, now_ms)
    return job.model_copy(update={"checkpoints": book})
