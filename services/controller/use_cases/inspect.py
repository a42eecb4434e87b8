"""Looking at ranks and nodes."""

from collections.abc import Sequence

from services.contract.api.views import (
    DiagnosisView,
    NodeList,
    NodeView,
    RankList,
    RankView,
)
from services.contract.system.long_work import in_turns
from services.contract.words.states import JobState
from services.controller.domain.errors import NotFoundError, no_node
from services.controller.domain.scheduling.node import Node
from services.controller.domain.scheduling.placement import usages_of
from services.controller.ports.coordination import Ports
from services.controller.use_cases import cursors
from services.controller.use_cases.present import diagnosis_view, node_view, rank_views


async def list_ranks(ports: Ports, job_id: str) -> RankList:
    """The ranks of a job's newest attempt.

    Raises:
        NotFoundError: There is no such job.
    """
    stored = await ports.jobs.load(job_id)
    samples = (await ports.telemetry.samples([job_id]))[job_id]
    return RankList(
        attempt=stored.job.fence,
        throughput_unit=stored.job.throughput_unit,
        items=tuple([view async for view in in_turns(rank_views(stored.job, samples))]),
    )


async def get_rank(ports: Ports, job_id: str, rank: int) -> RankView:
    """One of them.

    Raises:
        NotFoundError: There is no such job or rank.
    """
    ranks = await list_ranks(ports, job_id)
    for view in ranks.items:
        if view.rank == rank:
            return view
    raise NotFoundError(f"attempt {ranks.attempt} of {job_id} has no rank {rank}")


async def get_diagnosis(ports: Ports, job_id: str) -> DiagnosisView:
    """What is wrong with the newest attempt that was diagnosed or failed, or what ended it.

    Raises:
        NotFoundError: There is no such job, or no attempt of it failed or was looked into.
    """
    job = (await ports.jobs.load(job_id)).job
    for attempt in reversed(job.attempts):
        if attempt.diagnosis is not None:
            stacks = await ports.telemetry.stacks(job_id)
            return diagnosis_view(job_id, attempt.fence, attempt.diagnosis, stacks)
    if job.state is JobState.FAILED and not job.attempts:
        raise NotFoundError(f"{job_id} failed before its first attempt: {job.reason}")
    raise NotFoundError(
        f"no attempt of {job_id} has failed or was inspected; POST /v1/jobs/{job_id}/diagnose "
        "inspects running ranks"
    )


async def list_nodes(ports: Ports, cursor: str | None, limit: int) -> NodeList:
    """At most ``limit`` of the nodes that ever joined, by name, and what runs there.

    A cursor is the name of a node, so nodes that join or are forgotten meanwhile move nothing.

    Raises:
        InvalidRequestError: The cursor is none of ours.
    """
    after = cursors.to_name(cursor)
    behind = sorted((n for n in await ports.nodes.nodes() if n.id > after), key=lambda n: n.id)
    found = behind[:limit]
    more = cursors.from_name(found[-1].id) if len(behind) > limit else None
    return NodeList(items=await _node_views(ports, found), next_cursor=more)


async def get_node(ports: Ports, node_id: str) -> NodeView:
    """One node.

    Raises:
        NotFoundError: There is none.
    """
    found = await ports.nodes.node(node_id)
    if found is None:
        raise no_node(node_id)
    return (await _node_views(ports, [found]))[0]


async def _node_views(ports: Ports, nodes: Sequence[Node]) -> tuple[NodeView, ...]:
    leases = await ports.nodes.leases([node.id for node in nodes])
    jobs = [stored.job for stored in await ports.jobs.active()]
    standings = usages_of(nodes, jobs, leases)
    return tuple(node_view(s, leases.get(s.node.id)) for s in standings)
