"""Nobody keeps the event loop, or everybody's turn, for themselves."""

import asyncio
import dataclasses
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from starlette.types import Message, Receive, Scope, Send

from services.contract.api.access import Scope as TokenScope
from services.contract.system import long_work
from services.contract.system.long_work import GiveWay, Turns, in_turns
from services.contract.words.states import JobState
from services.controller.adapters.memory import memory_ports
from services.controller.adapters.memory.server import MemoryServer
from services.controller.adapters.redis.job_rows import KnownRows, Row, read_row
from services.controller.api import monitoring
from services.controller.api.concurrency import ParsingRounds, Shares
from services.controller.api.guard import AccessPolicy, Guard
from services.controller.api.middleware import BodyLimit
from services.controller.api.monitoring import Monitor
from services.controller.api.sse import StreamSlots
from services.controller.api.uploads import Uploads
from services.controller.domain.access.token import Principal
from services.controller.domain.errors import (
    TooManyOwnStreamsError,
    TooManyStreamsError,
    TooManyUploadsError,
)
from services.controller.ports.jobs import JobStore, Stored
from services.controller.use_cases import event_feed, listing, plan_list
from tests.controller.conftest import ControlPlane, open_plane
from tests.controller.histories import NOW, new_job
from tests.controller.test_plan_api import body, join
from tests.waiting import Rounds

pytestmark = pytest.mark.anyio


async def test_turns_go_from_subject_to_subject() -> None:
    turns, done = Turns(), list[str]()

    async def work(subject: str) -> None:
        async with turns.of(subject):
            await asyncio.sleep(0)
            done.append(subject)

    async with asyncio.TaskGroup() as group:
        for subject in ["max"] * 50 + ["mia", "moe"]:
            group.create_task(work(subject))
    assert len(done) == 52
    assert {"mia", "moe"} <= set(done[:4]), "they waited for one of the others' turns at most"


async def test_a_turn_whose_request_goes_away_is_the_next_ones() -> None:
    turns = Turns()
    async with turns.of("max"):
        waiting = asyncio.create_task(_enter(turns, "max"))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
    await _enter(turns, "max")


async def test_a_long_turn_is_given_up_for_those_who_wait_and_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(long_work, "_PART_S", 0.0)
    turns, done = Turns(), list[str]()

    async def look_through(parts: int) -> None:
        async with turns.in_parts("max") as give_way:
            for part in range(parts):
                done.append(f"max {part}")
                await asyncio.sleep(0)
                await give_way()

    async def work(subject: str) -> None:
        async with turns.of(subject):
            done.append(subject)

    async with asyncio.TaskGroup() as group:
        group.create_task(look_through(3))
        group.create_task(work("mia"))
        group.create_task(work("moe"))
    assert done == ["max 0", "mia", "moe", "max 1", "max 2"]


async def test_who_goes_away_while_others_have_their_turn_ends_none_of_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(long_work, "_PART_S", 0.0)
    turns = Turns()

    async def look_through() -> None:
        async with turns.in_parts("max") as give_way:
            while True:
                await asyncio.sleep(0)
                await give_way()

    looking = asyncio.create_task(look_through())
    await asyncio.sleep(0)
    async with turns.of("mia"):
        looking.cancel()
        await asyncio.wait([looking])
        assert turns.is_taken
    assert looking.cancelled()
    assert not turns.is_taken


@pytest.mark.redis
@pytest.mark.parametrize(
    ("path", "times"),
    [
        # Of seven jobs three at a time, and the records of the page.
        ("/v1/jobs?q=none", 2),
        ("/v1/jobs?sort=priority&limit=1", 2),
        ("/v1/jobs?limit=5", 1),
        ("/v1/jobs?limit=7", 4),
    ],
)
def test_who_looks_through_many_jobs_gives_way_after_each_part(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, path: str, times: int
) -> None:
    """Of one turn for tens of thousands everybody else's lists wait for seconds."""
    for _ in range(7):
        plane.submit()
    monkeypatch.setattr(listing, "_CHUNK", 3)
    monkeypatch.setattr(listing, "_READ", 3 if path.endswith("7") else 20)
    with _given_ways(monkeypatch) as given:
        plane.get(path)
    assert len(given) == times


@pytest.mark.redis
def test_who_looks_through_many_plans_gives_way_after_each_part(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_list, "_CHUNK", 1)
    with open_plane(redis_url, AccessPolicy(), plan_wait_s=0) as plane:
        join(plane)
        for number in range(3):
            assert plane.client.post("/v1/plans", json=body(name=f"plan-{number}")).is_success
        with _given_ways(monkeypatch) as given:
            plane.get("/v1/plans")
    assert len(given) == 3


def test_who_looks_through_many_events_gives_way_after_each_part(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(6):
        plane.submit()
    monkeypatch.setattr(event_feed, "_CHUNK", 3)
    with _given_ways(monkeypatch) as given:
        plane.get("/v1/events?owner=nobody")
    assert len(given) == 2


@contextmanager
def _given_ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Who gave way to others within."""
    given: list[str] = []
    in_parts = Turns.in_parts

    @asynccontextmanager
    async def counted(turns: Turns, subject: str) -> AsyncIterator[GiveWay]:
        async with in_parts(turns, subject) as give_way:

            async def counting() -> None:
                given.append(subject)
                await give_way()

            yield counting

    with monkeypatch.context() as patch:
        patch.setattr(Turns, "in_parts", counted)
        yield given


async def _enter(turns: Turns, subject: str) -> None:
    async with turns.of(subject):
        pass


class Crowd:
    """An application that counts how many requests of a subject it works on at a time."""

    def __init__(self) -> None:
        self.present: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        name = scope["state"]["principal"].subject
        self.present[name] = self.present.get(name, 0) + 1
        self.most[name] = max(self.most.get(name, 0), self.present[name])
        for _ in range(20):  # in each round of the loop one more begins
            await asyncio.sleep(0)
        self.present[name] -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/stream":
            self.begun.set()
            await self.may_end.wait()
        await send({"type": "http.response.body"})


async def test_a_subjects_requests_are_worked_on_a_few_at_a_time_and_streams_count_no_longer() -> (
    None
):
    crowd = Crowd()
    shares = Shares(crowd)

    async def ask(subject: str, path: str = "/v1/jobs") -> None:
        asks = Principal(subject=subject, scope=TokenScope.VIEWER)
        scope = {"type": "http", "method": "GET", "path": path, "state": {"principal": asks}}
        await shares(scope, _nothing, _nowhere)

    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(ask("max", "/stream")) for _ in range(20)]
        await crowd.begun.wait()
        asked = [group.create_task(ask(name)) for name in ["max"] * 60 + ["mia"] * 3]
        await asyncio.wait(asked)
        assert not any(stream.done() for stream in streams)
        crowd.may_end.set()
    assert crowd.most == {"max": 8, "mia": 3}


@pytest.mark.parametrize(("method", "path"), [("GET", "/stream"), ("POST", "/v1/plans")])
async def test_a_subject_has_no_more_than_its_share_of_the_connections(
    method: str, path: str
) -> None:
    may_end, answers = asyncio.Event(), list[tuple[str, int]]()

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await may_end.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    shares = Shares(app)

    async def ask(subject: str) -> None:
        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                answers.append((subject, message["status"]))

        asks = Principal(subject=subject, scope=TokenScope.SUBMITTER)
        state = {"principal": asks, "request_id": "r"}
        scope = {"type": "http", "method": method, "path": path, "headers": [], "state": state}
        await shares(scope, _nothing, note)

    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ask("max")) for _ in range(500)]
        group.create_task(ask("mia"))
        await asyncio.wait(asked[128:])
        may_end.set()
    assert answers.count(("max", 429)) == 500 - 128
    assert answers.count(("max", 200)) == 128
    assert ("mia", 200) in answers


async def test_few_uploads_of_code_begin_in_one_round_of_the_loop() -> None:
    """Hundreds that are refused for their digest at once took a second; they have bounds of their own beside this."""
    begun = 0

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        nonlocal begun
        begun += 1

    shares = Shares(app)
    asks = Principal(subject="max", scope=TokenScope.SUBMITTER)
    path = "/v1/code/x"
    scope = {"type": "http", "method": "PUT", "path": path, "headers": []}
    state = {"principal": asks, "request_id": "r"}
    requests = [
        asyncio.create_task(shares({**scope, "state": state}, _nothing, _nowhere))
        for _ in range(200)
    ]
    a_round = []
    while not all(each.done() for each in requests):
        before = begun
        await asyncio.sleep(0)
        a_round.append(begun - before)
    assert begun == 200
    assert max(a_round) <= 2


async def test_few_requests_begin_or_are_refused_in_one_round_of_the_loop() -> None:
    begun, refused = list[str](), 0

    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        begun.append(scope["state"]["principal"].subject)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    async def count(message: Message) -> None:
        nonlocal refused
        refused += message.get("status") == 429

    shares = Shares(app)

    async def ask(subject: str) -> None:
        asks = Principal(subject=subject, scope=TokenScope.SUBMITTER)
        state = {"principal": asks, "request_id": "r"}
        # Of plans eight of one subject at a time would be few: they wait for a node.
        scope = {"type": "http", "method": "POST", "path": "/v1/plans", "headers": []}
        await shares({**scope, "state": state}, _nothing, count)

    names = [name for name in ("max", "moe", "mo") for _ in range(160)] + ["mia"]
    requests = [asyncio.create_task(ask(name)) for name in names]
    a_round = []
    while not all(each.done() for each in requests):
        before = len(begun), refused
        await asyncio.sleep(0)
        a_round.append((len(begun) - before[0], refused - before[1]))
    assert len(begun) == 3 * 128 + 1
    assert refused == 3 * 32
    assert "mia" in begun[:8], "she waits for one of each of the others"
    begins, refusals = (max(counts) for counts in zip(*a_round, strict=True))
    assert begins <= 2, "hundreds of connections make a round take a second"
    assert refusals <= 8


@pytest.mark.parametrize("path", ["/healthz", "/v1/jobs"])
async def test_few_requests_of_strangers_are_worked_on_in_one_round_of_the_loop(path: str) -> None:
    begun = 0

    async def begins(_scope: Scope, _receive: Receive, _send: Send) -> None:
        nonlocal begun
        begun += 1

    async def answers(message: Message) -> None:
        nonlocal begun
        begun += message["type"] == "http.response.start"

    guard = Guard(begins, AccessPolicy(token="x" * 32), memory_ports(MemoryServer(lambda: NOW)))
    scope = {"type": "http", "method": "GET", "path": path, "headers": [(b"host", b"a")]}
    requests = [asyncio.create_task(guard(dict(scope), _nothing, answers)) for _ in range(100)]
    a_round = []
    while not all(each.done() for each in requests):
        before = begun
        await asyncio.sleep(0)
        a_round.append(begun - before)
    assert begun == 100
    assert max(a_round) <= 16, "hundreds of connections make a round take a second"


def _sends(body: bytes) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def _asks(subject: str) -> Scope:
    asks = Principal(subject=subject, scope=TokenScope.SUBMITTER)
    state = {"principal": asks, "request_id": "r"}
    return {"type": "http", "method": "POST", "path": "/", "headers": [], "state": state}


async def test_bodies_are_parsed_by_turns_and_few_large_ones_of_a_subject_are_held() -> None:
    served, refused = list[str](), list[int]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        served.append(scope["state"]["principal"].subject)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    limit = BodyLimit(app)

    async def note(message: Message) -> None:
        if message.get("status") == 429:
            refused.append(429)

    async with asyncio.TaskGroup() as group:
        for subject in ["max"] * 100 + ["mia"]:
            group.create_task(limit(_asks(subject), _sends(bytes(20_000)), note))
    assert served.count("max") == 32
    assert len(refused) == 68
    assert "mia" in served[:3]


async def test_small_bodies_wait_for_no_turn_and_large_ones_count_until_they_have_theirs() -> None:
    handed_over, answers = list[int](), list[int]()
    all_have_theirs, answered = asyncio.Event(), asyncio.Event()

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        handed_over.append(len(message["body"]))
        if len(handed_over) == 33:
            all_have_theirs.set()
        await answered.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def note(message: Message) -> None:
        answers.append(message.get("status", 0))

    limit = BodyLimit(app)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        for size in [20_000] * 32 + [100]:
            group.create_task(limit(_asks("max"), _sends(bytes(size)), note))
        await all_have_theirs.wait()
        assert handed_over[0] == 100
        group.create_task(limit(_asks("max"), _sends(bytes(20_000)), note))
        answered.set()
    assert answers == [200] * 34


@pytest.mark.parametrize("size", [1_100, 16_000, 262_000])
async def test_no_two_bodies_are_parsed_in_one_round_of_the_loop(size: int) -> None:
    """Whoever sent them: those of many subjects together cost a controller its lead."""
    rounds, seen = Rounds(), list[int]()

    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        await receive()
        seen.append(rounds.made)

    limit = BodyLimit(app)
    asked = [limit(_asks(f"s{n % 8}"), _sends(bytes(size)), _nowhere) for n in range(24)]
    async with rounds:
        await asyncio.gather(*asked)
    assert seen == sorted(set(seen))


async def test_after_a_body_the_loop_is_others_for_as_long_as_it_took() -> None:
    rounds, loop, moments = ParsingRounds(), asyncio.get_running_loop(), list[float]()

    async def parse(subject: str) -> None:
        await rounds.begin(subject, 1 << 14)
        moments.append(loop.time())
        while loop.time() < moments[-1] + 0.01:
            pass
        moments.append(loop.time())

    await asyncio.gather(parse("max"), parse("mia"))
    began, ended, began_next, _ = moments
    assert began_next - ended >= (ended - began) * 0.99


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


async def _nowhere(_: Message) -> None: ...


async def test_long_work_is_cut_into_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter(range(100))
    monkeypatch.setattr("services.contract.system.long_work.time.monotonic", lambda: next(moments))
    seen = list[int]()
    async with Rounds() as rounds:
        async for _ in in_turns(range(5)):
            seen.append(rounds.made)
    assert seen == sorted(set(seen))


async def test_of_all_who_work_long_few_go_on_in_one_round_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(long_work, "_TURN_S", -1.0)  # each item is a slice
    gone_on = Counter[int]()

    async def work(rounds: Rounds) -> None:
        async for place in in_turns(range(3)):
            if place:
                gone_on[rounds.made] += 1

    async with Rounds() as rounds:
        working = [asyncio.create_task(work(rounds)) for _ in range(30)]
        await asyncio.sleep(0)
        working[0].cancel()  # whoever asked has gone: it takes no room
        await asyncio.gather(*working, return_exceptions=True)
    assert gone_on.total() == 29 * 2
    assert max(gone_on.values()) <= 4


class Slow:
    """Jobs that take long to count."""

    def __init__(self, jobs: JobStore, clock: list[float], took_s: float) -> None:
        self._jobs, self._clock, self._took_s = jobs, clock, took_s
        self.counted = 0

    async def counts(self) -> dict[JobState, int]:
        self.counted += 1
        for _ in range(5):
            await asyncio.sleep(0)
        self._clock[0] += self._took_s
        return await self._jobs.counts()

    async def active(self) -> Sequence[Stored]:
        return await self._jobs.active()


@pytest.mark.parametrize(("took_s", "counted"), [(0.001, 3), (1.0, 2)])
async def test_anybody_may_ask_for_figures_and_jobs_are_counted_rarely(
    took_s: float, counted: int
) -> None:
    clock = [0.0]
    ports = memory_ports(MemoryServer(lambda: NOW, epoch=1))
    slow: Any = Slow(ports.jobs, clock, took_s)
    ports = dataclasses.replace(ports, jobs=slow)
    monitor = Monitor(now=lambda: clock[0])
    # Those that came at one moment share one count.
    texts = await asyncio.gather(*(monitor.exposition(ports) for _ in range(20)))
    assert all(b"meshloom_jobs" in text for text in texts)
    for pause_s in (5.0, 30.0):
        clock[0] += pause_s
        await monitor.exposition(ports)
    assert slow.counted == counted


async def test_figures_that_many_ask_for_at_one_moment_are_written_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[bytes] = []

    def write(registry: CollectorRegistry) -> bytes:
        written.append(generate_latest(registry))
        return written[-1]

    monkeypatch.setattr(monitoring, "generate_latest", write)
    clock = itertools.count()
    ports = memory_ports(MemoryServer(lambda: NOW, epoch=1))
    monitor = Monitor(now=lambda: float(next(clock)))
    await monitor.exposition(ports)  # it took long, and nothing is counted for a while
    monitor.answered("GET", "/metrics", 200, 0.1)
    texts = await asyncio.gather(*(monitor.exposition(ports) for _ in range(400)))
    assert texts == [written[1]] * 400
    assert len(written) == 2
    assert b'route="/metrics"' in written[1]


def test_what_was_read_is_known_until_it_changes_and_no_more_than_so_much() -> None:
    job = new_job()
    rows = [
        Row(name, job.model_copy(update={"id": name}).model_dump_json(), "1", {})
        for name in (f"job_{number:026}" for number in range(3))
    ]
    size = len(str(rows[0].doc))
    known = KnownRows(2 * size + 10)
    first = read_row(rows[0])
    known.put(rows[0], first)
    assert known.get(rows[0]) is first
    assert known.get(rows[0]._replace(version="2")) is None
    assert known.get(rows[0]._replace(checkpoints={"a": "b"})) is None
    for row in rows[1:]:
        known.put(row, read_row(row))
    assert [known.get(row) is not None for row in rows] == [False, True, True]
    known.forget(rows[1].job_id)
    assert known.get(rows[1]) is None


def test_jobs_that_have_ended_take_no_place_of_others_and_little_of_their_own() -> None:
    def row(number: int, state: JobState) -> Row:
        job = new_job().model_copy(update={"id": f"job_{number:026}", "state": state})
        return Row(job.id, job.model_dump_json(), "1", {})

    running = row(0, JobState.RUNNING)
    size = len(str(running.doc))
    known = KnownRows(2 * size, ended_characters=3 * size)
    ended = [row(number, JobState.SUCCEEDED) for number in range(1, 101)]
    for each in (running, *ended):
        known.put(each, read_row(each))
    assert known.get(running) is not None
    kept = [known.get(each) is not None for each in ended]
    assert sum(kept) == 2
    # One that ends is no longer kept among the others.
    over = row(0, JobState.FAILED)
    known.put(over, read_row(over))
    assert known.get(running) is None
    assert known.get(over) is not None


def test_subjects_that_together_take_all_streams_they_can_leave_some_to_the_next() -> None:
    slots = StreamSlots(64)
    for subject, most in (("ann", 16), ("ben", 16), ("cy", 16), ("dee", 8), ("eve", 4)):
        for _ in range(most):
            slots.take(subject)
        with pytest.raises(TooManyOwnStreamsError, match=f"^{subject} has {most} streams open"):
            slots.take(subject)
    slots.take("fay")
    for _ in range(2):
        slots.give_back("ann")
    slots.take("eve")


def test_eight_subjects_and_no_fewer_can_take_all_streams_together() -> None:
    slots, left = StreamSlots(64), []
    for number in range(8):
        with suppress(TooManyOwnStreamsError, TooManyStreamsError):
            while True:
                slots.take(f"subject-{number}")
        left.append(slots.free)
    assert left == [48, 32, 16, 8, 4, 2, 1, 0]


def test_subjects_that_together_upload_all_they_can_leave_a_slot_to_the_next() -> None:
    uploads = Uploads()
    with ExitStack() as stack:
        for subject, most in (("ann", 2), ("ben", 2), ("cy", 2), ("dee", 1)):
            for _ in range(most):
                stack.enter_context(uploads.slot(subject))
            with pytest.raises(TooManyUploadsError, match=f"{most} of them by {subject}"):
                stack.enter_context(uploads.slot(subject))
        stack.enter_context(uploads.slot("eve"))


def test_whoever_asks_for_a_diagnosis_waits_for_other_long_reads(quiet_plane: ControlPlane) -> None:
    """With the stacks of 256 ranks it took a fifth of a second in one go, and others' requests six with 32 at once."""
    job_id = quiet_plane.submit()
    state: Any = quiet_plane.client.app
    turns = state.state.context.turns
    held: list[bool] = []
    load = state.state.context.ports.jobs.load

    async def noted(name: str) -> object:
        held.append(turns.is_taken)
        return await load(name)

    jobs = state.state.context.ports.jobs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "load", noted)
        assert quiet_plane.client.get(f"/v1/jobs/{job_id}/diagnosis").status_code == 404
    assert held == [True]
