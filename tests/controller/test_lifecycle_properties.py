"""Whatever is requested, told, told twice or told too late: what a job's course always keeps.

A machine of jobs, nodes and agents on virtual time plays any sequence of events through the pure
decisions. Its agents are honest: they do as commanded and tell what happened, in order, but what
they told may come twice or late, ranks may die at any moment, and nodes may be lost and come back.
"""

import contextlib
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.contract.api.plan_views import JobEstimate, MemoryView
from services.contract.api.requests import JobPatch, ResourcesPatch
from services.contract.api.views import StopRequest
from services.contract.messages.base import Address
from services.contract.messages.commands import (
    Command,
    CommitCheckpoint,
    LaunchGang,
    RetireCheckpoint,
    StopGang,
)
from services.contract.messages.facts import (
    CheckpointLost,
    CheckpointRetired,
    ExitStanding,
    GangEnded,
    GangLaunched,
    LaunchRefused,
)
from services.contract.words.ids import checkpoint_id, new_job_id
from services.contract.words.states import CheckpointState, JobState
from services.controller.domain.decisions.attempt_events import is_overdue
from services.controller.domain.decisions.dispatch import decide, is_stale
from services.controller.domain.errors import (
    InvalidRequestError,
    PreconditionFailedError,
    StateConflictError,
)
from services.controller.domain.job.events import (
    AnswerOverdue,
    CancelAsked,
    CheckpointAsked,
    GangFact,
    GangPlaced,
    HoldAsked,
    HoldReleased,
    JobEvent,
    KillAsked,
    MoveAsked,
    NodeLost,
    PatchAsked,
    PauseAsked,
    PlacementDelayed,
    PlanAsked,
    PlanMade,
    PlanMissed,
    PlanRefused,
    ResumeAsked,
    SpecFaulted,
)
from services.controller.domain.job.job import SEVERITY, Job, Planning
from services.controller.domain.job.lifecycle import LEFT_ON_REQUEST, TRANSITIONS
from services.controller.domain.plans import default_plan
from services.controller.domain.scheduling.elastic import GrowthDelay, growth, shrinkage
from services.controller.domain.scheduling.node import Drain, Lease, Node
from services.controller.domain.scheduling.placement import Placed, usages_of
from services.controller.domain.scheduling.queue import Preempt, schedule
from tests.controller import histories
from tests.controller.histories import NOW, node, spec

SLOTS = {"loom-1": 4, "loom-2": 2}
NODES = tuple(SLOTS)
EVERYBODY = sum(SLOTS.values())
WORLDS = [(2, 2), (4, 4), (6, 6), (1, 4), (2, 6), (4, 6)]
STEPS = 30
HOLDER = "job_" + "0" * 26
STORE = Address(host="10.0.0.1", port=4711)
STOPS = st.builds(
    StopRequest,
    checkpoint=st.sampled_from(["required", "best_effort", "none"]),
    grace_s=st.sampled_from([0.0, 5.0]),
)
BOUNDS = [
    ResourcesPatch.model_validate({"world": world})
    for world in ({"max": 3}, {"max": 6}, {"min": 1}, {"min": 4, "max": 4})
]
REQUESTS = st.one_of(
    st.just(ResumeAsked()),
    st.builds(PauseAsked, STOPS),
    st.builds(CancelAsked, STOPS),
    st.just(ResumeAsked()),
    st.just(KillAsked()),
    st.just(ResumeAsked()),
    st.just(CheckpointAsked()),
    st.builds(
        PatchAsked,
        st.one_of(
            st.builds(JobPatch, priority=st.integers(-1, 2)),
            st.builds(JobPatch, resources=st.sampled_from(BOUNDS)),
        ),
        st.sampled_from([None, frozenset({0}), frozenset({1})]),
    ),
)


@dataclass
class Gang:
    """An attempt's ranks on a node, as they really are."""

    launch: LaunchGang
    node_id: str
    ranks: frozenset[int]
    incarnation: str
    step: int
    draining: bool = False


@dataclass
class ControlPlane:
    """The world outside the controller."""

    nodes: dict[str, Node] = field(default_factory=dict)
    gangs: dict[tuple[str, int, str], Gang] = field(default_factory=dict)
    launched: set[tuple[str, int, str]] = field(default_factory=set)
    opened: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    chain: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    inboxes: dict[str, list[Command]] = field(default_factory=lambda: defaultdict(list))
    facts: list[GangFact] = field(default_factory=list)
    told: list[GangFact] = field(default_factory=list)


class Lifecycle(RuleBasedStateMachine):
    """Three jobs on two nodes, of four seats and of two; some need both nodes."""

    @initialize(
        ranks=st.tuples(*[st.sampled_from(WORLDS)] * 3),
        budget=st.integers(0, 2),
        unplanned=st.integers(0, 3),
    )
    def begin(self, ranks: tuple[tuple[int, int], ...], budget: int, unplanned: int) -> None:
        self.now = NOW
        self.plane = ControlPlane({name: node(name, slots=count) for name, count in SLOTS.items()})
        self.jobs: dict[str, Job] = {}
        self.read: dict[str, Job] = {}
        for number, (least, most) in enumerate(ranks):
            elastic = {"world": {"min": least, "max": most}}
            asked = spec(
                resources=elastic if least < most else {"ranks": least},
                train={"steps": STEPS, "global_batch": 12},
                checkpoint={"keep_last": 1 + number % 2},
                faults={"max_restarts": budget},
            )
            job = Job(
                id=new_job_id(NOW + number, bytes(10)),
                spec=asked,
                created_ms=NOW + number,
                updated_ms=NOW + number,
                planning=Planning() if number < unplanned else None,
            )
            self.jobs[job.id] = job

    # --- what people and the clock do -----------------------------------------------------------

    @rule(which=st.integers(0, 2), ask=REQUESTS, before=st.integers(0, 2), heard=st.booleans())
    def ask(self, which: int, ask: JobEvent, before: int, *, heard: bool) -> None:
        """Somebody requests something of a job that has been doing well, or of one that has not."""
        if before:
            self.prosper(1, before, 4)
        self._ask(which, ask)
        if heard:
            for name in NODES:
                self.obey(name, 99, refuses=False)

    @rule(which=st.integers(0, 2), first=REQUESTS, second=REQUESTS)
    def request_twice(self, which: int, first: JobEvent, second: JobEvent) -> None:
        self._ask(which, first)
        self._ask(which, second)

    def _ask(self, which: int, ask: JobEvent) -> None:
        with contextlib.suppress(StateConflictError, InvalidRequestError, PreconditionFailedError):
            self._happen(self._job(which).id, ask)

    @rule(which=st.integers(0, 2), choice=st.integers(0, 3))
    def resume_from_a_checkpoint(self, which: int, choice: int) -> None:
        job = self._job(which)
        names = sorted(job.checkpoints)
        if names:
            with contextlib.suppress(StateConflictError, InvalidRequestError):
                self._happen(job.id, ResumeAsked(names[choice % len(names)]))

    @rule(which=st.integers(0, 2), choice=st.integers(0, 3), release=st.booleans())
    def hold_a_checkpoint(self, which: int, choice: int, *, release: bool) -> None:
        job = self._job(which)
        names = sorted(job.checkpoints)
        if names:
            name = names[choice % len(names)]
            event = HoldReleased(name, HOLDER) if release else HoldAsked(name, HOLDER)
            with contextlib.suppress(InvalidRequestError):
                self._happen(job.id, event)

    @rule(elapsed_ms=st.sampled_from([1, 1_000, 20_000, 90_000]), grows=st.booleans())
    def look(self, elapsed_ms: int, *, grows: bool) -> None:
        """One look of the reconciler; whoever could grow has waited for long enough, or not."""
        self.now += elapsed_ms
        for job in list(self.jobs.values()):
            if is_overdue(job, self.now):
                self._happen(job.id, AnswerOverdue())
        self._leave_draining_nodes()
        for job in list(self.jobs.values()):
            smaller = shrinkage(job)
            if smaller is not None:
                self._happen(job.id, smaller)
        self._serve_queue(grows=grows)

    @rule(
        which=st.integers(0, 2),
        how=st.sampled_from(["made", "made", "missed", "refused", "faulted"]),
    )
    def plan(self, which: int, how: str) -> None:
        """What a job's layout waits for comes, or does not."""
        job = self._job(which)
        asked = None if job.planning is None else job.planning.plan_id
        plan_id = asked or f"plan_{self.now:026d}"
        estimate = JobEstimate(
            plan_id=plan_id, peak=MemoryView(), where="optimizer", unit="", micro_batch=1
        )
        events: dict[str, JobEvent] = {
            "made": PlanMade(default_plan.shard(job.spec), estimate),
            "missed": PlanMissed(plan_id, "it crashed"),
            "refused": PlanRefused(plan_id, "too large", "take more ranks"),
            "faulted": SpecFaulted(plan_id, "no such argument", NODES[0]),
        }
        self._happen(job.id, events[how] if asked else PlanAsked(plan_id, "asked", job.revision))

    @rule(name=st.sampled_from(NODES), drains=st.booleans())
    def drain(self, name: str, *, drains: bool) -> None:
        ask = Drain(asked_ms=self.now) if drains else None
        self._put(name, drain=ask)

    # --- what agents and ranks do ---------------------------------------------------------------

    @rule(
        name=st.sampled_from(NODES),
        count=st.integers(1, 6),
        refuses=st.sampled_from([False] * 9 + [True]),
    )
    def obey(self, name: str, count: int, *, refuses: bool) -> None:
        """The agent carries out its next commands."""
        for _ in range(min(count, len(self.plane.inboxes[name]))):
            self._obey(name, refuses=refuses)

    def _obey(self, name: str, *, refuses: bool) -> None:
        command = self.plane.inboxes[name].pop(0)
        match command:
            case LaunchGang():
                self._launch(command, name, refuses=refuses)
            case StopGang():
                self._stop(command, name)
            case CommitCheckpoint():
                self._commit(command, name)
            case RetireCheckpoint():
                self._retire(command, name)

    @rule(rounds=st.integers(1, 3), steps=st.integers(1, 9), votes=st.sampled_from([0, 1, 6, 6]))
    def prosper(self, rounds: int, steps: int, votes: int) -> None:
        """All goes well for a while: what is commanded is done, what is told is heard."""
        for _ in range(rounds):
            for which in range(3):
                self.plan(which, "made")
                self.plan(which, "made")
            self.look(1_000, grows=False)
            for name in NODES:
                self.obey(name, 99, refuses=False)
            self.hear(99)
            for which in range(3):
                self.train(which, steps)
                self.save(which, votes)
            self.hear(99)
            for which in range(3):
                if any(gang.draining for gang in self._gangs(which)):
                    self.end(which, "drained")

    @rule(which=st.integers(0, 2))
    def favour(self, which: int) -> None:
        """One job becomes more important than the others: they make room if they must."""
        for number, job in enumerate(list(self.jobs.values())):
            self._happen(job.id, PatchAsked(JobPatch(priority=2 * (number == which))))
        self.prosper(2, 1, EVERYBODY)

    @rule(which=st.integers(0, 2), heard=st.booleans())
    def complete(self, which: int, *, heard: bool) -> None:
        """The ranks of a job do all that is left to do."""
        self.end(which, "done")
        if heard:
            self.hear(99)

    @rule(which=st.integers(0, 2), steps=st.integers(1, 12))
    def train(self, which: int, steps: int) -> None:
        for gang in self._gangs(which):
            if not self._is_whole(gang):
                continue  # ranks wait for each other
            gang.step = min(gang.step + steps, STEPS)
            job = self._job_of(gang)
            self._tell(self._by(gang, histories.progressed(job, gang.step, gang.launch.fence)))

    @rule(which=st.integers(0, 2), votes=st.integers(0, 6))
    def save(self, which: int, votes: int) -> None:
        """Ranks write a checkpoint; some of them may never vote."""
        for gang in self._gangs(which):
            self._save(gang, votes)

    @rule(which=st.integers(0, 2), how=st.sampled_from(["killed", "raised", "drained", "done"]))
    def end(self, which: int, how: str) -> None:
        gangs = self._gangs(which)
        whole = all(map(self._is_whole, gangs))
        if how in {"killed", "raised"}:
            gangs = gangs[:1]  # on another node they stand until they are told
        for gang in gangs:
            job, fence = self._job_of(gang), gang.launch.fence
            if how == "done" and whole:
                gang.step = STEPS
                self._save(gang, EVERYBODY)
                self._end(gang, histories.finished(job, fence, step=STEPS))
            elif how == "drained" and gang.draining and whole:
                self._save(gang, EVERYBODY)
                self._end(gang, histories.finished(job, fence, step=gang.step, drained=True))
            elif how == "raised" and 1 in gang.ranks:
                self._end(gang, histories.crashed(job, "ValueError: x", fence, gang.step))
            else:
                self._end(gang, histories.killed(job, fence, gang.step))

    @rule(name=st.sampled_from(NODES), farewell=st.booleans(), dies=st.sampled_from([False, True]))
    def lose_node(self, name: str, *, farewell: bool, dies: bool) -> None:
        """The agent dies with its ranks and comes back; what it told still comes, later."""
        if not dies:
            return
        self.plane.gangs = {k: g for k, g in self.plane.gangs.items() if g.node_id != name}
        life = self.plane.nodes[name].incarnation
        self._put(name, incarnation=f"{life}+")
        for job in list(self.jobs.values()):
            attempt = job.attempt
            if attempt is not None and attempt.incarnations.get(name) == life:
                self._happen(job.id, NodeLost(name, "its agent died", farewell=farewell))

    # --- how what was told arrives --------------------------------------------------------------

    @rule(count=st.integers(1, 8))
    def hear(self, count: int) -> None:
        for _ in range(min(count, len(self.plane.facts))):
            fact = self.plane.facts.pop(0)
            self.plane.told.append(fact)
            self._happen(fact.job_id, fact)
            job = self.jobs[fact.job_id]
            again = decide(job, fact, self.now)
            assert (again.job, again.sends, again.notes) == (job, (), ()), "told twice, done twice"

    @rule(index=st.integers(0, 500))
    def hear_again(self, index: int) -> None:
        """A fact from any time is delivered once more."""
        if self.plane.told:
            fact = self.plane.told[index % len(self.plane.told)]
            before = self.jobs[fact.job_id]
            self._happen(fact.job_id, fact)
            if is_stale(before, fact):
                assert self.jobs[fact.job_id] == before

    # --- what always holds ----------------------------------------------------------------------

    @invariant()
    def no_seat_is_given_twice(self) -> None:
        for name in NODES:
            taken = 0
            for job in getattr(self, "jobs", {}).values():
                if job.attempt is not None and job.plan and name in job.attempt.live_nodes:
                    taken += sum(1 for seat in job.plan.ranks if seat.node_id == name)
            assert taken <= SLOTS[name]

    @invariant()
    def at_most_the_newest_attempt_lives(self) -> None:
        for job in getattr(self, "jobs", {}).values():
            living = [a for a in job.attempts if a.ended_ms is None]
            assert living in ([], [job.attempts[-1]] if job.attempts else [])
            assert [a.fence for a in job.attempts] == list(range(1, job.fence + 1))
            if job.is_terminal or job.state in {JobState.QUEUED, JobState.RESTARTING}:
                assert not living

    @invariant()
    def no_attempt_begins_before_the_layout_is_chosen(self) -> None:
        for job in getattr(self, "jobs", {}).values():
            assert job.planning is None or not job.attempts

    @invariant()
    def a_record_reads_as_it_was_written(self) -> None:
        for job in getattr(self, "jobs", {}).values():
            if self.read.get(job.id) is job:  # it has not changed since
                continue
            read = Job.model_validate_json(job.model_dump_json())
            assert read.model_copy(update={"checkpoints": job.checkpoints}) == job
            self.read[job.id] = job

    # --- the machine's own ----------------------------------------------------------------------

    def _leave_draining_nodes(self) -> None:
        for job in list(self.jobs.values()):
            for name in job.attempt.live_nodes if job.attempt is not None else ():
                if self.plane.nodes[name].drain is not None:
                    self._happen(job.id, MoveAsked("node_drained", name, "moves", 5.0))

    def _serve_queue(self, *, grows: bool) -> None:
        nodes = self.plane.nodes.values()
        leases = {n.id: Lease(n.incarnation, 5_000) for n in nodes}
        jobs = [job for job in self.jobs.values() if job.is_active]
        found = schedule(jobs, usages_of(nodes, jobs, leases), {}, self.now)
        for turn in found.turns:
            match turn.outcome:
                case Placed() as placed:
                    plan = default_plan.gang(turn.job.spec, placed)
                    self._happen(turn.job.id, GangPlaced(plan, placed.incarnations))
                case Preempt(victims=victims):
                    for victim in victims:
                        assert victim.spec.priority < turn.job.spec.priority
                        move = MoveAsked("preempted", turn.job.id, "makes room", 5.0)
                        self._happen(victim.id, move)
                case waits:
                    self._happen(turn.job.id, PlacementDelayed(waits.reason))
        for option in found.growth_options if grows else ():
            larger = growth(option, 0, self.now, GrowthDelay(0, 0))
            assert larger is not None
            self._happen(option.job.id, larger)

    def _happen(self, job_id: str, event: JobEvent) -> None:
        before = self.jobs[job_id]
        decision = decide(before, event, self.now)
        self.jobs[job_id] = decision.job
        if isinstance(event, GangPlaced) and decision.job.fence > before.fence:
            assert event.plan.world_size in before.spec.worlds
        for send in decision.sends:
            self.plane.inboxes[send.node_id].append(send.command)
        _check_step(before, event, decision.job)

    def _job(self, which: int) -> Job:
        return list(self.jobs.values())[which]

    def _job_of(self, gang: Gang) -> Job:
        """The job with the plan of this gang's attempt, of which its agents tell."""
        return self.jobs[gang.launch.job_id].model_copy(update={"plan": gang.launch.plan})

    def _gangs(self, which: int) -> list[Gang]:
        job_id = self._job(which).id
        return [g for (name, _, _), g in self.plane.gangs.items() if name == job_id]

    def _is_whole(self, gang: Gang) -> bool:
        job_id, fence = gang.launch.job_id, gang.launch.fence
        nodes = {seat.node_id for seat in gang.launch.plan.ranks}
        return all((job_id, fence, name) in self.plane.gangs for name in nodes)

    def _put(self, name: str, **fields: object) -> None:
        self.plane.nodes[name] = self.plane.nodes[name].model_copy(update=fields)

    def _tell(self, *facts: GangFact) -> None:
        self.plane.facts += facts

    def _by(self, gang: Gang, fact: GangFact) -> GangFact:
        """What the agent of the gang's node tells of it: of its own ranks alone."""
        changes: dict[str, object] = {"node_id": gang.node_id}
        if isinstance(fact, GangEnded):
            changes["exits"] = tuple(gone for gone in fact.exits if gone.rank in gang.ranks)
        if isinstance(fact, GangLaunched):
            changes["pids"] = {r: pid for r, pid in fact.pids.items() if r in gang.ranks}
            changes["store"] = STORE if 0 in gang.ranks else None
        return fact.model_copy(update=changes)

    def _launch(self, command: LaunchGang, name: str, *, refuses: bool) -> None:
        key = (command.job_id, command.fence, name)
        if key in self.plane.launched:
            return
        ranks = frozenset(s.rank for s in command.plan.ranks if s.node_id == name)
        assert (command.store is None) == (0 in ranks), "only rank 0 opens the store"
        overtaken = self.plane.opened[command.job_id] > command.fence
        if refuses or overtaken:
            self._refuse(command, name)
            return
        self.plane.launched.add(key)
        self.plane.opened[command.job_id] = command.fence
        if command.resume_from is not None:
            assert command.resume_from in self.plane.chain[command.job_id], "nothing to load"
        step = int(command.resume_from.rsplit("-", 2)[1][1:]) if command.resume_from else 0
        gang = Gang(command, name, ranks, self.plane.nodes[name].incarnation, step)
        self.plane.gangs[key] = gang
        self._tell(self._by(gang, histories.launched(self._job_of(gang), command.fence)))

    def _stop(self, command: StopGang, name: str) -> None:
        key = (command.job_id, command.fence, name)
        if key not in self.plane.launched:
            self._refuse(command, name)
            return
        gang = self.plane.gangs.get(key)
        if gang is None:
            return
        gang.draining = True
        if command.mode == "kill":
            killed = histories.killed(self._job_of(gang), command.fence, gang.step)
            victims = [
                gone.model_copy(update={"standing": ExitStanding.VICTIM}) for gone in killed.exits
            ]
            self._end(gang, killed.model_copy(update={"exits": tuple(victims)}))

    def _refuse(self, command: LaunchGang | StopGang, name: str) -> None:
        self.plane.launched.add((command.job_id, command.fence, name))
        refusal = LaunchRefused(
            job_id=command.job_id, fence=command.fence, node_id=name, reason="no room"
        )
        self._tell(refusal)

    def _commit(self, command: CommitCheckpoint, name: str) -> None:
        job, manifest = self.jobs[command.job_id], command.manifest
        chain = self.plane.chain[job.id]
        if self.plane.opened[job.id] > command.fence and manifest.checkpoint_id not in chain:
            lost = CheckpointLost(
                job_id=job.id,
                fence=command.fence,
                node_id=name,
                checkpoint_id=manifest.checkpoint_id,
                reason="a newer attempt is open",
            )
            self._tell(lost)
            return
        if manifest.checkpoint_id not in chain:
            chain.append(manifest.checkpoint_id)
        number = chain.index(manifest.checkpoint_id) + 1
        linked = histories.linked(job, manifest.step, command.fence, number)
        self._tell(linked.model_copy(update={"node_id": name, "manifest": manifest}))

    def _retire(self, command: RetireCheckpoint, name: str) -> None:
        if self.plane.opened[command.job_id] > command.fence:
            return
        chain = self.plane.chain[command.job_id]
        if command.checkpoint_id in chain:
            chain[chain.index(command.checkpoint_id)] = "(deleted)"
        self._tell(
            CheckpointRetired(
                job_id=command.job_id,
                fence=command.fence,
                node_id=name,
                checkpoint_id=command.checkpoint_id,
            )
        )

    def _save(self, gang: Gang, votes: int) -> None:
        job, fence = self._job_of(gang), gang.launch.fence
        name = checkpoint_id(job.id, gang.step, fence)
        if gang.step == 0 or name in self.plane.chain[job.id]:
            return
        facts: list[GangFact] = [histories.began(job, gang.step, fence)]
        cast = histories.votes(job, gang.step, fence)[:votes]
        facts += [vote for vote in cast if vote.shard.rank in gang.ranks]
        self._tell(*(self._by(gang, fact) for fact in facts))

    def _end(self, gang: Gang, fact: GangFact) -> None:
        self.plane.gangs.pop((gang.launch.job_id, gang.launch.fence, gang.node_id))
        self._tell(self._by(gang, fact))


def _check_step(before: Job, event: JobEvent, after: Job) -> None:
    """One decision keeps all that a course must keep."""
    if before.is_terminal and after.state != before.state:
        assert (before.state, after.state) in LEFT_ON_REQUEST
        late = before.state == JobState.FAILED and after.state == JobState.SUCCEEDED
        assert isinstance(event, ResumeAsked) or (late and isinstance(event, GangFact))
    assert after.fence - before.fence in ({0, 1} if isinstance(event, GangPlaced) else {0})
    if before.stop is not None and before.attempt is not None and after.attempt is not None:
        assert after.stop is not None
        assert SEVERITY[after.stop.kind] >= SEVERITY[before.stop.kind]
    for name, known in before.checkpoints.items():
        now = after.checkpoints.get(name)
        if known.state == CheckpointState.COMMITTED and now != known:
            assert now is not None
            assert now.state == CheckpointState.DELETING
            assert name not in after.holds
            assert after.latest_checkpoint is not None
            assert after.latest_checkpoint.step >= 0
        if known.state == CheckpointState.DELETING and now is None:
            assert name in after.gone
    if after.resume_point.step > 0:
        named = after.checkpoints[str(after.resume_point.checkpoint_id)]
        assert named.state == CheckpointState.COMMITTED


def test_every_move_of_the_table_leads_somewhere_and_nothing_leads_nowhere() -> None:
    reached = {target for targets in TRANSITIONS.values() for target in targets}
    assert reached | {JobState.QUEUED} == set(JobState)


class ManyLifecycles(Lifecycle):
    """The same, of which more are gone through."""


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(max_examples=40, stateful_step_count=50, derandomize=True)
TestManyLifecycles = pytest.mark.system(ManyLifecycles.TestCase)
TestManyLifecycles.settings = settings(max_examples=240, stateful_step_count=50, derandomize=True)
