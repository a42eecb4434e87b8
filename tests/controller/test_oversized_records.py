"""What an agent wrote too long or too often costs its own job or node: reads are bounded."""

import asyncio
import json
from collections import Counter
from typing import Any, cast

import pytest
from redis import Redis

from services.contract.messages.commands import LaunchGang
from services.contract.messages.telemetry import RankSample
from services.contract.redis import redis_keys as keys
from services.contract.words.bounds import MOST_RANKS
from services.contract.words.ids import new_job_id
from services.controller.adapters.redis import connection, redis_ports
from services.controller.api.guard import AccessPolicy
from services.controller.domain.errors import StoreUnavailableError
from services.controller.ports.machines import Log
from tests.controller.agent_double import AgentDouble, append_fact
from tests.controller.conftest import ControlPlane, open_plane
from tests.controller.histories import NODE
from tests.waiting import Rounds, until


def two_that_train(plane: ControlPlane) -> tuple[str, str]:
    """Two jobs on the plane's node."""
    plane.agent.join()
    first, second = plane.submit(resources={"ranks": 1}), plane.submit(resources={"ranks": 1})
    for job_id in (first, second):
        plane.agent.trains(plane.agent.launches(job_id), [1])
        plane.in_state(job_id, "RUNNING")
    return first, second


@pytest.mark.redis
def test_a_fact_that_is_longer_than_any_costs_itself_and_is_not_read(
    plane: ControlPlane, caplog: pytest.LogCaptureFixture
) -> None:
    append_fact(plane.redis, "loom-1", "x" * (keys.LONGEST_FACT + 1))
    many = json.dumps({"kind": "gang_launched", "pids": {f"a{n}": "x" for n in range(60_000)}})
    append_fact(plane.redis, "loom-1", many)
    nested = json.dumps({"kind": "node_measured", "detail": {"a": [[]] * (1 << 20)}})
    append_fact(plane.redis, "loom-1", nested)
    plane.agent.join()
    until(lambda: plane.get("/v1/nodes")["items"])
    # By what they say: a controller that lost the lead reads them once more.
    said = {
        str(vars(record)["body"]): str(vars(record)["error"])
        for record in caplog.records
        if record.msg == "unreadable_fact"
    }
    assert len(said) == 3
    assert list(said.values())[-1].endswith("parts")
    assert all(len(body) < 1_000 and len(error) < 3_000 for body, error in said.items())
    assert f'"bytes":{keys.LONGEST_FACT + 1}' in next(iter(said))


@pytest.mark.redis
def test_telemetry_of_any_size_costs_its_job_alone(redis_url: str) -> None:
    """Every agent may add to every job's samples, and all lists and loops read them."""
    with open_plane(redis_url, AccessPolicy()) as plane:
        flooded, other = two_that_train(plane)
        told = RankSample(
            rank=0,
            local_rank=0,
            fence=1,
            node_id=NODE,
            device="cpu",
            pid=1,
            phase="FORWARD",
            step=1,
        )
        sample = told.model_dump_json()
        for name in ("step", "memory_bytes", "seen_ms"):  # of which no float can be made
            beyond = json.dumps(json.loads(sample) | {name: 10**400})
            plane.redis.hset(keys.job_ranks(other), "0", beyond)
            assert plane.client.get("/v1/metrics").status_code == 200
            assert len(plane.get("/v1/jobs")["items"]) == 2
        plane.redis.hset(keys.job_ranks(other), "0", sample)
        many: dict[Any, Any] = {str(rank): sample for rank in range(MOST_RANKS + 1)}
        plane.redis.hset(keys.job_ranks(flooded), mapping=many)
        assert plane.get(f"/v1/jobs/{flooded}/ranks")["items"][0]["phase"] == "PENDING"
        assert plane.get(f"/v1/jobs/{other}/ranks")["items"][0]["phase"] == "FORWARD"
        assert "records" in plane.get("/readyz")["checks"]
        # The bound is that of all jobs whose samples are read at once.
        for job_id in (flooded, other):
            plane.redis.delete(keys.job_ranks(job_id))
        plane.redis.hset(keys.job_ranks(other), "0", sample)
        long: dict[Any, Any] = {str(n): "x" * (8 << 20) for n in range(9)}
        plane.redis.hset(keys.job_ranks(flooded), mapping=long)
        assert len(plane.get("/v1/jobs")["items"]) == 2
        assert plane.get(f"/v1/jobs/{flooded}/ranks")["items"][0]["phase"] == "PENDING"
        many_digits = json.dumps(json.loads(sample) | {"issued": {"g": 10**400}})
        plane.redis.hset(keys.job_ranks(other), "0", many_digits)
        assert plane.get(f"/v1/jobs/{other}/ranks")["items"][0]["phase"] == "PENDING"


@pytest.mark.redis
@pytest.mark.anyio
async def test_samples_of_all_jobs_together_are_bounded_and_small_ones_are_read(
    redis_url: str,
) -> None:
    names = [new_job_id(number, bytes(10)) for number in range(5)]
    sample = RankSample(
        rank=0, local_rank=0, fence=1, node_id=NODE, device="cpu", pid=1, phase="IDLE", step=1
    ).model_dump_json()
    with Redis.from_url(redis_url) as redis:
        for name in names:
            redis.hset(keys.job_ranks(name), "0", sample)
        for name in names[:4]:  # each within the bound of one job
            long: dict[Any, Any] = {str(n): f"{sample}{' ' * (8 << 20)}" for n in range(5)}
            redis.hset(keys.job_ranks(name), mapping=long)
    async with redis_ports(redis_url) as ports:
        told = await ports.telemetry.samples(names)
    assert [name for name in names if told[name]] in ([n, names[4]] for n in names[:4])


@pytest.mark.redis
@pytest.mark.anyio
async def test_samples_of_very_many_parts_are_not_read_and_others_have_the_loop_between_many(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (new_job_id(number, bytes(10)) for number in range(2))
    sample = json.loads(
        RankSample(
            rank=0, local_rank=0, fence=1, node_id=NODE, device="cpu", pid=1, phase="IDLE", step=1
        ).model_dump_json()
    )
    lists = json.dumps(sample | {"issued": {"g": [[]] * 1_000_000}})
    many = {str(rank): json.dumps(sample | {"rank": rank}) for rank in range(2_000)}
    with Redis.from_url(redis_url) as redis:
        redis.hset(keys.job_ranks(first), "0", lists)
        redis.hset(keys.job_ranks(second), mapping=cast("dict[Any, Any]", many))
    rounds, read_in = Rounds(), Counter[int]()
    parse = RankSample.model_validate_json

    def counted(text: str) -> RankSample:
        assert len(text) < len(lists)
        read_in[rounds.made] += 1
        return parse(text)

    monkeypatch.setattr(RankSample, "model_validate_json", counted)
    async with redis_ports(redis_url) as ports, rounds:
        told = await ports.telemetry.samples([first, second])
    assert not told[first]
    assert len(told[second]) == 2_000
    assert max(read_in.values()) <= 200


@pytest.mark.redis
def test_records_of_any_length_and_number_cost_their_job_alone(redis_url: str) -> None:
    """Every agent may add to every job's streams, and lists and loops read them each second."""
    with open_plane(redis_url, AccessPolicy()) as plane:
        flooded, other = two_that_train(plane)
        long = f'{{"x":[{"[]," * 1_000_000}[]]}}'
        streams = (keys.job_steps, keys.job_metrics, keys.job_logs)
        for stream in streams:
            for _ in range(3):
                plane.redis.xadd(stream(flooded), {keys.MESSAGE_FIELD: long})
        for _ in range(3):  # one is met at a time
            assert len(plane.get("/v1/jobs")["items"]) == 2
            plane.get(f"/v1/jobs/{flooded}/logs")
        for stream in streams:
            assert int(plane.redis.memory_usage(stream(flooded)) or 0) < len(long)
        shown = {item["id"]: item["progress"]["loss"] for item in plane.get("/v1/jobs")["items"]}
        assert shown == {flooded: 5.0, other: 5.0}
        assert [s["step"] for s in plane.get(f"/v1/jobs/{flooded}/metrics")["items"]] == [1]


@pytest.mark.redis
@pytest.mark.anyio
async def test_an_entry_of_very_many_empty_fields_is_removed_when_it_is_met(redis_url: str) -> None:
    """Redis takes longer for these than for as many megabytes in one field."""
    job_id = new_job_id(1, bytes(10))
    streams = (keys.job_steps(job_id), keys.job_metrics(job_id), keys.job_logs(job_id))
    with Redis.from_url(redis_url) as redis:
        client: Any = redis
        for stream in streams:
            client.execute_command("XADD", stream, "*", *[""] * 20_000)
        async with redis_ports(redis_url) as ports:
            await ports.telemetry.last_steps([job_id], 10)
            await ports.telemetry.last_metrics([job_id], 10)
            await ports.telemetry.read(job_id, Log.OUTPUT, None, 10)
        assert [redis.xlen(stream) for stream in streams] == [0, 0, 0]


@pytest.mark.redis
@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["output", "facts"])
async def test_who_waits_reads_nothing_of_what_comes(redis_url: str, kind: str) -> None:
    """An agent may add hundreds of megabytes; of output each follower would have the controller hold as much."""
    job_id, long = new_job_id(1, bytes(10)), "x" * (8 << 20)
    with Redis.from_url(redis_url) as redis:

        def told(section: str, name: str) -> int:
            return int(cast("dict[str, Any]", redis.info(section))[name])

        async with redis_ports(redis_url) as ports, asyncio.timeout(20):
            await ports.facts.prepare()
            before = told("stats", "total_net_output_bytes")
            waiting: asyncio.Future[Any] = asyncio.ensure_future(
                ports.telemetry.wait(job_id, Log.OUTPUT, None, 15)
                if kind == "output"
                else ports.facts.next(8, 15)
            )
            await asyncio.to_thread(until, lambda: told("clients", "blocked_clients"))
            if kind == "output":
                redis.xadd(keys.job_logs(job_id), {keys.MESSAGE_FIELD: long})
            else:
                redis.rpush(keys.FACT_SENDERS, long)
            assert not await waiting
            assert told("stats", "total_net_output_bytes") - before < 1 << 20


@pytest.mark.redis
@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["output", "facts"])
async def test_who_waits_is_told_soon_that_redis_became_a_replica(
    redis_url: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers whoever waits with an error, which is not read, and then nothing on that connection."""
    monkeypatch.setattr(connection, "_ANSWER_S", 1.0)
    job_id = new_job_id(1, bytes(10))
    with Redis.from_url(redis_url) as redis:

        def waits() -> int:
            return int(cast("dict[str, Any]", redis.info("clients"))["blocked_clients"])

        async with redis_ports(redis_url) as ports, asyncio.timeout(20):
            await ports.facts.prepare()
            waiting: asyncio.Future[Any] = asyncio.ensure_future(
                ports.telemetry.wait(job_id, Log.OUTPUT, None, 3)
                if kind == "output"
                else ports.facts.next(8, 3)
            )
            await asyncio.to_thread(until, waits)
            redis.replicaof("127.0.0.1", "1")
            try:
                with pytest.raises(StoreUnavailableError):
                    await waiting
            finally:
                redis.replicaof("NO", "ONE")
            assert await ports.facts.next(8, 0.01) == []


@pytest.mark.redis
@pytest.mark.anyio
async def test_no_more_of_a_stream_is_read_than_is_kept_and_behind_the_last_id_is_nothing(
    redis_url: str,
) -> None:
    job_id, last = new_job_id(1, bytes(10)), f"{(1 << 64) - 1}-{(1 << 64) - 1}"
    with Redis.from_url(redis_url) as redis, redis.pipeline(transaction=False) as pipe:
        for _ in range(2 * keys.LOGS_KEPT + 500):
            pipe.xadd(keys.job_logs(job_id), {keys.MESSAGE_FIELD: "{}"})
        pipe.xadd(keys.job_logs(job_id), {keys.MESSAGE_FIELD: "{}"}, last)
        pipe.execute()
    async with redis_ports(redis_url) as ports:
        found, after = 0, None
        while page := await ports.telemetry.read(job_id, Log.OUTPUT, after, 10_000):
            found, after = found + len(page), page[-1].id
    assert (found, after) == (2 * keys.LOGS_KEPT, last)


@pytest.mark.redis
@pytest.mark.anyio
async def test_of_a_lease_no_more_is_read_than_one_has(redis_url: str) -> None:
    with Redis.from_url(redis_url) as redis:
        redis.set(keys.node_lease("long"), "x" * (8 << 20), px=60_000)
        redis.set(keys.node_lease("usual"), "life-1", px=60_000)
    async with redis_ports(redis_url) as ports:
        leases = await ports.nodes.leases(["long", "usual", "none"])
    assert leases.keys() == {"long", "usual"}
    assert leases["usual"].incarnation == "life-1"
    assert len(leases["long"].incarnation) < 1_000


@pytest.mark.redis
def test_a_fact_of_more_ranks_than_a_node_may_have_costs_itself_alone(
    plane: ControlPlane,
) -> None:
    plane.agent.join()
    job_id = plane.submit(resources={"ranks": 1})
    plane.agent.trains(plane.agent.launches(job_id), [1])
    plane.in_state(job_id, "RUNNING")
    about = {"job_id": job_id, "fence": 1, "node_id": plane.agent.node_id}
    ranks = [{"rank": n, "pid": 0, "phase": "x" * 75} for n in range(MOST_RANKS)]
    findings = {"why": "asked", "still_s": 0, "allowed_s": 0, "ranks": ranks}
    said = about | {"kind": "gang_diagnosed", "findings": findings}
    told = json.dumps(said, separators=(",", ":"))
    assert len(told) < keys.LONGEST_FACT
    append_fact(plane.redis, plane.agent.node_id, told)
    AgentDouble(plane.redis, "loom-2").join()
    until(lambda: len(plane.get("/v1/nodes")["items"]) == 2)
    plane.agent.trains(plane.agent.awaits(LaunchGang, job_id), [2])
    assert plane.job(job_id)["state"] == "RUNNING"


@pytest.mark.redis
@pytest.mark.anyio
@pytest.mark.parametrize("floods_with", ["ids", "facts"])
async def test_what_one_agent_adds_without_end_holds_up_no_facts_of_known_nodes(
    redis_url: str, floods_with: str
) -> None:
    nodes = [f"known-{number}" for number in range(100)]
    told = [(node, str(number)) for node in sorted(nodes) for number in range(3)]
    with Redis.from_url(redis_url) as redis:
        redis.hset(keys.NODES, mapping=dict.fromkeys(nodes, "{}"))
        redis.rpush(keys.FACT_SENDERS, *["floods"] * 20_000)
        if floods_with == "facts":
            redis.rpush(keys.node_facts("floods"), *map(str, range(20_000)))
        for node, body in told:
            append_fact(redis, node, body)
    came: list[tuple[str | None, str]] = []
    known: list[tuple[str | None, str]] = []
    rounds = 0
    async with redis_ports(redis_url) as ports:
        await ports.facts.prepare()
        while len(known) < len(told):
            rounds += 1
            entries = await ports.facts.next(128, 1.0)
            await ports.facts.acknowledge([entry.id for entry in entries])
            came += [(entry.sender, entry.body) for entry in entries]
            known = [each for each in came if each[0] != "floods"]
        assert rounds <= 10
        # Each node's own in order, and none is lost or taken twice.
        assert sorted(known) == told
        for node in (*nodes, "floods"):
            of_node = [int(body) for sender, body in came if sender == node]
            assert of_node == list(range(len(of_node)))


@pytest.mark.redis
@pytest.mark.anyio
async def test_long_facts_of_one_node_hold_up_no_other_node_while_nodes_have_turns(
    redis_url: str,
) -> None:
    nodes = [f"known-{number}" for number in range(4)]
    long = "x" * keys.LONGEST_FACT
    came: set[str | None] = set()
    with Redis.from_url(redis_url) as redis:
        redis.hset(keys.NODES, mapping=dict.fromkeys(nodes, "{}"))
        redis.rpush(keys.FACT_SENDERS, *["floods"] * 3_000)
        for node in nodes[2:]:
            append_fact(redis, node, "{}")
        async with redis_ports(redis_url) as ports:
            await ports.facts.prepare()
            for _ in range(2 * len(nodes)):
                # Each of these fills what is taken at once.
                for node in nodes[:2]:
                    if not redis.llen(keys.node_facts(node)):
                        append_fact(redis, node, long)
                entries = await ports.facts.next(128, 1.0)
                await ports.facts.acknowledge([entry.id for entry in entries])
                came |= {entry.sender for entry in entries}
    assert came >= {*nodes}
