"""At-least-once delivery: a repeated or late fact never changes the outcome."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.contract.messages.facts import CheckpointRetired
from services.contract.words.states import JobState
from services.controller.domain.job.effects import Decision
from services.controller.domain.job.events import GangPlaced, JobEvent
from services.controller.domain.job.job import Job
from tests.controller.histories import (
    NODE,
    STEPS,
    began,
    finished,
    killed,
    launched,
    linked,
    new_job,
    placed,
    play,
    progressed,
    votes,
)


@st.composite
def one_attempt(
    draw: st.DrawFn, job: Job, fence: int, number: int, *, succeeds: bool
) -> list[JobEvent]:
    """What an agent may say of an attempt: votes in any order, links as late as it likes."""
    steps = sorted(draw(st.sets(st.integers(2, STEPS - 1), max_size=3)))
    steps = [*steps, STEPS] if succeeds else steps
    told: list[JobEvent] = [launched(job, fence), progressed(job, 1, fence)]
    links: list[JobEvent] = []
    for index, step in enumerate(steps):
        told += [began(job, step, fence), *draw(st.permutations(votes(job, step, fence)))]
        links.append(linked(job, step, fence, number + index))
        for link in list(links):
            if draw(st.booleans()):
                told.append(link)
                links.remove(link)
            else:
                break
    told.append(finished(job, fence) if succeeds else killed(job, fence, step=STEPS - 1))
    return told + links


@st.composite
def history(draw: st.DrawFn) -> list[JobEvent]:
    """A job that may lose its ranks once or twice before it succeeds."""
    job = new_job(resources={"ranks": draw(st.sampled_from([1, 2, 3]))})
    losses = draw(st.integers(0, 2))
    events: list[JobEvent] = []
    for fence in range(1, losses + 2):
        told = draw(one_attempt(job, fence, fence * 10, succeeds=fence > losses))
        events += [placed(job), *told]
    return events


@st.composite
def history_and_repeats(draw: st.DrawFn) -> tuple[list[JobEvent], list[JobEvent]]:
    """A history, and the same with facts that come again at any later time."""
    events = draw(history())
    repeated = list(events)
    for _ in range(draw(st.integers(1, 8))):
        source = draw(st.integers(0, len(repeated) - 1))
        if not isinstance(repeated[source], GangPlaced):
            repeated.insert(draw(st.integers(source + 1, len(repeated))), repeated[source])
    return events, repeated


def _replay(events: list[JobEvent]) -> Decision:
    ranks = next(e.plan.world_size for e in events if isinstance(e, GangPlaced))
    return play(new_job(resources={"ranks": ranks}), events)


@settings(max_examples=150)
@given(history_and_repeats())
def test_repeated_facts_change_neither_the_job_nor_what_is_commanded(
    pair: tuple[list[JobEvent], list[JobEvent]],
) -> None:
    once, again = _replay(pair[0]), _replay(pair[1])
    assert once.job.state is JobState.SUCCEEDED
    assert again.job == once.job
    assert again.sends == once.sends
    assert again.notes == once.notes


@settings(max_examples=50)
@given(history())
def test_a_history_told_twice_over_ends_as_told_once(events: list[JobEvent]) -> None:
    once = _replay(events)
    told = [event for event in events if not isinstance(event, GangPlaced)]
    assert play(once.job, told).job == once.job


@settings(max_examples=50)
@given(history())
def test_retired_checkpoints_stay_gone(events: list[JobEvent]) -> None:
    job = _replay(events).job
    gone: list[JobEvent] = [
        CheckpointRetired(job_id=job.id, fence=job.fence, node_id=NODE, checkpoint_id=c.id)
        for c in job.checkpoints.values()
        if c.state == "DELETING"
    ]
    after = play(job, gone).job
    told = [event for event in events if not isinstance(event, GangPlaced)]
    assert play(after, told).job == after
    assert after.latest_checkpoint == job.latest_checkpoint
