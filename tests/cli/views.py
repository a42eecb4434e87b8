"""Answers of the API with the longest values that they may have."""

from datetime import UTC, datetime, timedelta
from typing import Any

from services.contract.api.access import AuditEntryView, AuditPage, Scope, TokenList, TokenView
from services.contract.api.plan_views import PlanList, PlanSummary
from services.contract.api.queue import (
    CapacityView,
    NodeCapacity,
    PoolList,
    PoolView,
    QueueEntry,
    QueueView,
    ReservationView,
)
from services.contract.api.views import (
    AttemptList,
    AttemptView,
    CheckpointList,
    CheckpointView,
    EventPage,
    EventView,
    ExportView,
    JobPage,
    JobView,
    NodeList,
    NodeView,
    Progress,
    RankList,
    RankView,
)
from services.contract.api.webhooks import WebhookList, WebhookView
from services.contract.jobs.specs import JobSpec
from services.contract.messages.facts import Inventory
from services.contract.words.ids import (
    checkpoint_id,
    new_job_id,
    new_plan_id,
    new_token_id,
    new_webhook_id,
)
from services.contract.words.states import (
    CheckpointState,
    ExitReason,
    JobState,
    NodeState,
    PlanState,
    PoolKind,
    ReservationState,
)
from tests.controller.conftest import job_body

NOW = datetime.now(UTC)
LONG_NAME = "a-name-of-" + "many" * 12 + "-parts"
NODE = "node-" + "0123456789" * 3 + ".rack"
REASON = (
    "waits for 64 free CPU slots: the nodes have 3 in all, and job_00000000000000000000000000 of higher "
    "priority takes them first (" + "x" * 40 + ")"
)
FOLDER = "exports/" + "a-long-folder/" * 12 + "end"


def ids(number: int) -> dict[str, str]:
    """An id of each kind."""
    some = bytes([number] * 10)
    job = new_job_id(number + 1, some)
    return {
        "job": job,
        "checkpoint": checkpoint_id(job, 999_999_999, 9_999),
        "plan": new_plan_id(number + 1, some),
        "token": new_token_id(number + 1, some),
        "webhook": new_webhook_id(number + 1, some),
    }


def job(number: int = 0, **changes: object) -> JobView:
    """A job that runs; ``changes`` are fields of its view."""
    known: dict[str, Any] = {
        "id": ids(number)["job"],
        "name": LONG_NAME,
        "state": JobState.CANCELLING,
        "reason": REASON,
        "progress": Progress(
            step=999_999, of=1_000_000, loss=1234.5678, tokens_per_s=123_456_789, eta_s=359_999
        ),
        "labels": {"a-label": "x" * 200},
        "owner": "somebody-with-a-long-name@example.com",
        "priority": -1000,
        "latest_checkpoint": ids(number)["checkpoint"],
        "created_at": NOW - timedelta(days=400),
        "updated_at": NOW,
        "spec": JobSpec.model_validate(job_body(code="sha256:" + "ab" * 32)),
    }
    return JobView.model_validate(known | changes)


def jobs() -> JobPage:
    return JobPage(items=tuple(map(job, range(3))))


def queue() -> QueueView:
    entries = [
        QueueEntry(
            position=number + 1,
            job_id=ids(number)["job"],
            name=LONG_NAME,
            state=JobState.QUEUED,
            priority=1000,
            ranks=65_536,
            device="cuda",
            reason=REASON,
            waiting_since=NOW - timedelta(days=3),
            expected_start_at=NOW + timedelta(hours=99),
        )
        for number in range(3)
    ]
    return QueueView(items=tuple(entries))


def plans() -> PlanList:
    items = [
        PlanSummary(
            id=ids(number)["plan"],
            state=PlanState.READY,
            reason=REASON,
            feasible=False,
            name=LONG_NAME,
            owner="somebody",
            created_at=NOW,
            expires_at=NOW,
            ranks=65_536,
            peak_bytes=1 << 40,
            memory_limit_bytes=1 << 41,
            step_time_s=1234.5,
        )
        for number in range(2)
    ]
    return PlanList(items=tuple(items))


def checkpoint(number: int = 0) -> CheckpointView:
    return CheckpointView(
        id=ids(number)["checkpoint"],
        job_id=ids(number)["job"],
        state=CheckpointState.COMMITTED,
        step=999_999_999,
        fence=9_999,
        world_size=4_096,
        bytes=1 << 44,
        loss=1234.5678,
        evaluation={"loss": 1.5, "accuracy_of_the_validation_set": 0.25},
        best=True,
        reason=REASON,
        created_at=NOW - timedelta(days=100),
        verified_at=NOW,
        pinned=True,
        held_by=(ids(1)["job"], ids(2)["job"]),
        export=ExportView(
            state="DONE", folder=FOLDER, files=("model-00001-of-00002.safetensors",), bytes=1 << 44
        ),
    )


def checkpoints() -> CheckpointList:
    return CheckpointList(items=tuple(map(checkpoint, range(3))))


def nodes() -> NodeList:
    inventory = Inventory(
        hostname="host",
        cpu_slots=512,
        cpu_count=512,
        memory_bytes=1 << 42,
        versions={"torch": "2.13"},
    )
    node = NodeView(
        id=NODE,
        state=NodeState.DRAINING,
        inventory=inventory,
        cpu_slots_used=500,
        jobs=tuple(ids(number)["job"] for number in range(4)),
        joined_at=NOW,
    )
    return NodeList(items=(node, node.model_copy(update={"id": "loom-1", "jobs": ()})))


def capacity() -> CapacityView:
    node = NodeCapacity(
        node_id=NODE,
        state=NodeState.READY,
        cpu_slots=512,
        cpu_slots_free=500,
        accelerators=8,
        accelerators_free=8,
    )
    return CapacityView(
        nodes=(node,),
        cpu_slots=512,
        cpu_slots_free=500,
        accelerators=8,
        accelerators_free=8,
        largest_cpu_gang=500,
        largest_cuda_gang=8,
    )


def pools() -> PoolList:
    reserved = ReservationView(
        id="nodes-1",
        state=ReservationState.PROVISIONING,
        node_ids=tuple(f"a-pool-of-a-long-name-{number}" for number in range(16)),
        job_id=ids(0)["job"],
        reason="Resources, " + "and more of them, " * 5,
        requested_at=NOW,
        ready_at=None,
    )
    pool = PoolView(
        name="a-pool-of-a-long-name",
        kind=PoolKind.KUBERNETES,
        max_nodes=10_000,
        cpu_slots=0,
        accelerators=8,
        ready_timeout_s=900,
        idle_timeout_s=300,
        trouble=None,
        reservations=(reserved,),
        ended=(reserved.model_copy(update={"state": ReservationState.LOST, "ended_at": NOW}),),
    )
    silent = pool.model_copy(update={"trouble": "no route to host", "reservations": ()})
    return PoolList(items=(pool, silent))


def tokens() -> TokenList:
    token = TokenView(
        id=ids(0)["token"],
        subject="somebody-with-a-name-of-many-parts@somewhere.example.com",
        scope=Scope.SUBMITTER,
        label="a label of " + "many " * 30,
        created_at=NOW,
        created_by="bootstrap",
        expires_at=NOW,
    )
    return TokenList(items=(token,))


def webhooks() -> WebhookList:
    hook = WebhookView(
        id=ids(0)["webhook"],
        url="https://a-receiver-with-a-long-name." + "sub." * 10 + "example.com:8443",
        kinds=("checkpoint.*", "job.failed", "job.succeeded"),
        labels=("team=vision",),
        format="standard",
        created_by="somebody-with-a-name-of-many-parts@somewhere.example.com",
        created_at=NOW,
        delivered=123_456_789,
        dropped=12_345,
        delivered_at=NOW - timedelta(days=100),
        last_error=REASON,
    )
    return WebhookList(items=(hook, hook.model_copy(update={"disabled": True})))


def audit() -> AuditPage:
    entry = AuditEntryView(
        id="1-0",
        at=NOW,
        actor="somebody-with-a-name-of-many-parts@somewhere.example.com",
        request_id="0123456789abcdef" * 2,
        method="POST",
        path=f"/v1/checkpoints/{ids(0)['checkpoint']}/verify",
        status=403,
        outcome="refused",
        left_out=12_345,
    )
    return AuditPage(items=(entry,))


def attempts() -> AttemptList:
    attempt = AttemptView(
        fence=9_999,
        world_size=65_536,
        node_ids=(NODE, "loom-2"),
        started_at=NOW,
        first_step=1,
        last_step=999_999,
        lost_steps=100_000,
        exit_reason=ExitReason.RESTARTS_EXHAUSTED,
        time_to_first_step_s=3_599,
    )
    return AttemptList(items=(attempt,))


def ranks() -> RankList:
    rank = RankView(
        rank=65_535,
        local_rank=7,
        node_id=NODE,
        device="cuda:7",
        phase="POST_BACKWARD",
        unit="transformer.blocks.31.feed_forward",
        step=999_999,
        step_time_s=1234.567,
        data_wait_s=123.456,
        arrival_lag_s=12.3456,
        straggler_score=1.0,
        is_straggler=True,
        loss=1234.5678,
        tokens_per_s=123_456_789,
        memory_bytes=1 << 40,
        last_seen_at=NOW,
    )
    return RankList(attempt=1, items=(rank, rank.model_copy(update={"rank": 0})))


def events() -> EventPage:
    event = EventView(
        id="1-0",
        at=NOW,
        job_id=ids(0)["job"],
        kind="checkpoint.committed",
        message=f"{ids(0)['checkpoint']} of step 999999999 is committed; {REASON}",
        actor="controller",
    )
    return EventPage(items=(event,))
