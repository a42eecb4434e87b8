"""`GET /v1/events`: pages, filters, and a stream that outlives its controller."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest

import meshloom
from services.contract.system.long_work import Turns
from services.controller.adapters.redis import redis_ports
from services.controller.ports.event_feed import FeedEntry
from services.controller.use_cases import event_feed
from services.local.embedded_redis import EmbeddedRedis
from tests.controller.conftest import ControlPlane, job_body
from tests.dashboard.tabs import Controller
from tests.waiting import until

pytestmark = pytest.mark.redis


def test_events_of_all_jobs_are_chosen_by_kind_job_owner_and_label(
    quiet_plane: ControlPlane,
) -> None:
    first = quiet_plane.submit(labels={"team": "a"})
    second = quiet_plane.submit(labels={"team": "b"})
    quiet_plane.act(first, "kill")

    def told(query: str) -> list[tuple[str, str]]:
        page = quiet_plane.get(f"/v1/events?{query}")
        return [(event["job_id"], event["kind"]) for event in page["items"]]

    everything = [(first, "job.queued"), (second, "job.queued"), (first, "job.cancelled")]
    assert told("") == everything
    assert told("kind=job.queued") == everything[:2]
    assert told("kind=job.c*") == []
    assert told("kind=job.*") == everything
    assert told("kind=checkpoint.*&kind=job.cancelled") == everything[2:]
    assert told(f"job_id={second}") == everything[1:2]
    assert told("label=team%3Da") == [everything[0], everything[2]]
    assert told("owner=local") == everything
    assert told("owner=somebody") == []
    assert quiet_plane.client.delete(f"/v1/jobs/{first}").status_code == 204
    assert told("label=team%3Da") == [everything[0], everything[2]]
    assert told("label=team%3Db") == everything[1:2]
    assert told("owner=local&kind=job.cancelled") == everything[2:]
    assert told("owner=somebody") == []


def test_pages_of_the_feed_follow_each_other(quiet_plane: ControlPlane) -> None:
    ids = [quiet_plane.submit() for _ in range(3)]
    page = quiet_plane.get("/v1/events?limit=2")
    rest = quiet_plane.get(f"/v1/events?limit=2&cursor={page['next_cursor']}")
    assert [event["job_id"] for event in page["items"] + rest["items"]] == ids
    assert rest["next_cursor"] is None


@pytest.mark.anyio
async def test_streams_read_the_events_that_are_there_one_at_a_time(
    redis_url: str, quiet_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pages do: dozens of them would have the loop to themselves, which also renews the lead."""
    ids = [quiet_plane.submit() for _ in range(7)]
    monkeypatch.setattr(event_feed, "_CHUNK", 3)
    turns, in_turn, working = Turns(), list[bool](), set[object]()

    async def reads(after: str | None, count: int) -> Sequence[FeedEntry]:
        in_turn.append(asyncio.current_task() in working)
        assert len(working) < 2
        return await read(after, count)

    @asynccontextmanager
    async def turn() -> AsyncIterator[None]:
        async with turns.of("max"):
            working.add(asyncio.current_task())
            yield
            working.clear()

    async def follows() -> list[str]:
        found: list[str] = []
        async for event in event_feed.follow_feed(
            ports, event_feed.EventFilter(), None, replay=True, turn=turn
        ):
            found += [] if event is None else [event.job_id]
            if len(found) == len(ids):
                break
        return found

    async with redis_ports(redis_url) as ports:
        read = ports.events.read
        monkeypatch.setattr(ports.events, "read", reads)
        assert await asyncio.gather(*(follows() for _ in range(3))) == [ids] * 3
    assert in_turn == [True] * 9


@pytest.fixture(scope="module")
def controller(
    redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Controller]:
    redis_server.flush()
    with Controller(redis_server.url, tmp_path_factory.mktemp("controller")) as controller:
        yield controller


def test_a_follower_misses_nothing_while_the_controller_is_killed_and_comes_back(
    controller: Controller,
) -> None:
    seen: list[tuple[str, str]] = []
    wanted = 6

    def follow() -> None:
        with meshloom.Client(controller.url, patience_s=60) as client:
            for event in client.events.follow(replay=True, kind=["job.queued"]):
                seen.append((event.id, event.job_id))
                if len(seen) == wanted:
                    return

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    with meshloom.Client(controller.url, patience_s=60) as client:
        jobs = [client.jobs.submit(job_body()).id for _ in range(3)]
        until(lambda: len(seen) == 3)
        controller.kill()
        controller.start()
        controller.wait_until_ready()
        jobs += [client.jobs.submit(job_body()).id for _ in range(3)]
        follower.join(60)
        assert [job_id for _, job_id in seen] == jobs
        listed = client.events.list(kind=["job.queued"])
    assert [event.id for event in listed] == [event_id for event_id, _ in seen]


def test_a_follower_without_a_place_sees_what_comes_from_then_on(controller: Controller) -> None:
    with meshloom.Client(controller.url, patience_s=60) as client:
        client.jobs.submit(job_body(name="before"))
        begun = threading.Event()
        found: list[str] = []

        def follow() -> None:
            with meshloom.Client(controller.url) as own:
                for event in own.events.follow(kind=["job.queued"], label=["probe"]):
                    found.append(own.jobs.get(event.job_id).name)
                    begun.set()
                    return

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()

        # The stream begins at an unknown moment: jobs are submitted until it shows one.
        def begins() -> bool:
            client.jobs.submit(job_body(name="after", labels={"probe": ""}))
            return begun.is_set()

        until(begins)
        follower.join(60)
    assert found == ["after"]
