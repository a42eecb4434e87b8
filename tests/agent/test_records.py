"""A real agent appends what its gangs tell to storage, closes it, and brings it back."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import pytest
from redis.asyncio import Redis
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.contract.messages.commands import CloseRecords, RecallRecords, StopGang
from services.contract.messages.facts import RecordsClosed
from services.contract.messages.telemetry import StepRecord
from services.contract.redis import redis_keys as keys
from services.controller.adapters.redis import redis_ports
from services.worker.agent.storage.journal import Journal
from services.worker.agent.storage.record_files import (
    LOGS,
    STEPS,
    EntryId,
    Part,
    read_entries,
    records_folder,
)
from services.worker.agent.storage.records import RecordKeeper
from services.worker.agent.streams.redis_clients import Connections, NewestFirst, writing_client
from tests.agent.conftest import (
    JOB,
    NODE,
    AgentProcess,
    Controller,
    StartAgent,
    ended,
    launch,
    running,
)
from tests.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.redis, pytest.mark.system]
WITHIN_S: Final = 120.0


def in_storage(agent: AgentProcess) -> dict[int, StepRecord]:
    entries = read_entries(agent.checkpoint_root, JOB, STEPS).values()
    records = [StepRecord.model_validate_json(body) for body in entries]
    found = {record.step: record for record in records}
    assert len(found) == len(records), "no step is there twice"
    return found


def ask_back(url: str, node_id: str = NODE) -> None:
    async def ask() -> None:
        async with redis_ports(url) as ports:
            assert await ports.telemetry.ask_back(JOB, 1, node_id)

    asyncio.run(ask())


def put_together(url: str) -> bool:
    async def look() -> bool:
        async with redis_ports(url) as ports:
            return await ports.telemetry.put_together(JOB, has_ended=False)

    return asyncio.run(look())


def test_a_curve_survives_the_agent_that_is_killed_and_a_redis_that_is_wiped(
    agent: AgentProcess, controller: Controller, start_agent: StartAgent, redis_url: str
) -> None:
    running(controller, lines=3)
    until(lambda: len(in_storage(agent)) > 20, timeout_s=WITHIN_S)
    kept = in_storage(agent)
    agent.kill()
    # As a crash in the middle of a write leaves it.
    (part,) = records_folder(agent.checkpoint_root, JOB).glob("steps.*.jsonl")
    with part.open("ab") as file:
        file.write(b'{"id":"17')
    second = start_agent()
    ended(controller)
    controller.open_job(fence=2)
    controller.send(launch(2, 2, 5))
    ended(controller, fence=2)
    controller.client.flushall()
    controller.open_job(fence=2)
    until(lambda: controller.client.exists(keys.node_lease(NODE)), timeout_s=WITHIN_S)

    ask_back(redis_url)
    until(lambda: put_together(redis_url), timeout_s=WITHIN_S)
    steps = controller.steps()
    first = {record.step: record for record in steps if record.fence == 1}
    assert kept.items() <= first.items()
    assert len(first) == sum(record.fence == 1 for record in steps)
    assert [record.step for record in steps if record.fence == 2] == [1, 2, 3, 4, 5]
    assert {line.text for line in controller.logs()} >= {"line 0", "line 1", "line 2"}
    # What one agent left is one file since the next attempt began.
    folder = records_folder(second.checkpoint_root, JOB)
    until(lambda: not list(folder.glob("steps.0001.*")), timeout_s=WITHIN_S)
    assert (folder / "steps.jsonl.gz").is_file()


def test_a_gang_that_floods_its_log_fills_no_more_than_redis_keeps(
    agent: AgentProcess, controller: Controller
) -> None:
    controller.send(launch(1, 2, 3, lines=30_000))
    ended(controller)
    controller.send(CloseRecords(job_id=JOB, fence=1))
    controller.fact(RecordsClosed)
    lines = read_entries(agent.checkpoint_root, JOB, LOGS)
    assert len(lines) <= LOGS.kept
    assert {path.name for path in records_folder(agent.checkpoint_root, JOB).iterdir()} == {
        "logs.jsonl.gz",
        "steps.jsonl.gz",
    }


def test_closing_again_and_what_came_between_is_one_curve(
    agent: AgentProcess, controller: Controller
) -> None:
    for fence in (1, 2):
        controller.open_job(fence)
        controller.send(launch(fence, 2, 4))
        ended(controller, fence)
        controller.send(CloseRecords(job_id=JOB, fence=fence))
        controller.fact(RecordsClosed, lambda fact, fence=fence: fact.fence == fence)  # type: ignore[misc] # a default
    entries = read_entries(agent.checkpoint_root, JOB, STEPS)
    rows: Any = controller.client.xrange(keys.job_steps(JOB))
    assert [str(name) for name in entries] == [name for name, _ in rows]
    assert list(entries.values()) == [fields[keys.MESSAGE_FIELD] for _, fields in rows]


def test_a_node_whose_storage_has_no_such_job_does_not_say_that_there_is_nothing(
    agent: AgentProcess, controller: Controller, redis_url: str
) -> None:
    running(controller)
    until(lambda: len(in_storage(agent)) > 2, timeout_s=WITHIN_S)
    gone = agent.checkpoint_root.with_name("not-mounted")
    agent.checkpoint_root.rename(gone)
    ask_back(redis_url)
    until(lambda: "storage_has_no_such_job" in agent.log.read_text(), timeout_s=WITHIN_S)
    assert not put_together(redis_url)
    gone.rename(agent.checkpoint_root)
    before = len(in_storage(agent))
    # What could not be written meanwhile is written now.
    until(lambda: len(in_storage(agent)) > before + 20, timeout_s=WITHIN_S)
    steps = sorted(in_storage(agent))
    assert steps == list(range(1, len(steps) + 1))
    controller.send(StopGang(job_id=JOB, fence=1, mode="kill"))


def test_what_was_told_before_a_clock_was_set_back_comes_back(
    controller: Controller, redis_url: str, tmp_path: Path
) -> None:
    week_ms = 7 * 86_400_000
    ahead = EntryId(time.time_ns() // 1_000_000 + week_ms, 0)
    record = StepRecord(step=1, fence=1, loss=1.0, tokens_per_s=1.0, step_time_s=0.1)
    (tmp_path / JOB).mkdir()
    Part(tmp_path, JOB, STEPS, 1, "n-1.life").append([(ahead, record.model_dump_json())])
    controller.open_job()
    ask_back(redis_url)
    asked = str(controller.client.hget(keys.recalled(JOB), "asked"))

    async def recall() -> None:
        async with writing_client(redis_url) as client:
            connections = Connections(client, client, client)
            keeper = RecordKeeper(connections, NODE, tmp_path, Journal(tmp_path, "n-1.other"))
            await keeper.carry_out(RecallRecords(job_id=JOB, fence=1, asked=asked))

    asyncio.run(recall())
    assert put_together(redis_url)
    assert controller.steps() == [record]


class InTimeUpTo:
    """A client that gets no answer in time of a script that is asked for more than so many entries."""

    def __init__(self, most: int, client: Redis) -> None:
        self._most = most
        self._client = client

    def __getattr__(self, name: str) -> object:
        return getattr(self._client, name)

    def register_script(self, text: str) -> Callable[..., object]:
        script = self._client.register_script(text)

        async def run(keys: list[str], args: list[str | int]) -> object:
            if "XREVRANGE" in text and int(args[1]) > self._most:
                raise RedisTimeoutError
            return await script(keys=keys, args=args)

        return run


def closed_by(redis_url: str, folder: Path, *, in_time_up_to: int = 1_000_000) -> list[int]:
    """The steps that an agent finds in Redis when it closes the records."""

    async def close() -> None:
        async with writing_client(redis_url) as client:
            slow: Any = InTimeUpTo(in_time_up_to, client)
            connections = Connections(client, client, slow)
            keeper = RecordKeeper(connections, NODE, folder, Journal(folder, "n-1.other"))
            async with asyncio.timeout(WITHIN_S):
                assert await keeper.carry_out(CloseRecords(job_id=JOB, fence=1))

    (folder / JOB).mkdir()
    asyncio.run(close())
    bodies = read_entries(folder, JOB, STEPS).values()
    return [StepRecord.model_validate_json(body).step for body in bodies]


def add_steps(controller: Controller, steps: Iterable[int]) -> None:
    controller.open_job()
    with controller.client.pipeline(transaction=False) as pipe:
        for step in steps:
            record = StepRecord(step=step, fence=1, loss=1.0, tokens_per_s=1.0, step_time_s=0.1)
            fields: Any = {keys.MESSAGE_FIELD: record.model_dump_json()}
            pipe.xadd(keys.job_steps(JOB), fields, id=f"{step}-0")
        pipe.execute()


def test_a_stream_that_never_comes_is_not_asked_for_without_end(
    controller: Controller, redis_url: str, tmp_path: Path
) -> None:
    """Redis takes seconds for an entry of hundreds of megabytes, which any agent of the job may add."""
    add_steps(controller, range(1, 4))
    assert closed_by(redis_url, tmp_path, in_time_up_to=0) == []


def test_an_entry_that_is_longer_than_any_record_is_passed_over_when_records_are_closed(
    controller: Controller, redis_url: str, tmp_path: Path
) -> None:
    add_steps(controller, range(1, 4))
    record = StepRecord(step=4, fence=1, loss=1.0, tokens_per_s=1.0, step_time_s=0.1)
    for number in range(40):
        fields: Any = {keys.MESSAGE_FIELD: " " * (1 << 20) + record.model_dump_json()}
        controller.client.xadd(keys.job_steps(JOB), fields, id=f"4-{number}")
    add_steps(controller, [5])
    assert closed_by(redis_url, tmp_path) == [1, 2, 3, 5]


def test_a_page_has_few_entries_of_very_many_empty_fields(
    controller: Controller, redis_url: str
) -> None:
    """Redis takes seconds for some dozens of these, in which nobody gets an answer."""
    add_steps(controller, [1])
    client: Any = controller.client
    for number in range(6):
        fields = [""] * 200_000
        client.execute_command("XADD", keys.job_steps(JOB), f"2-{number}", *fields)

    async def pages() -> list[int]:
        found, start = [], "+"
        async with writing_client(redis_url) as client:
            while rows := await NewestFirst(client).rows(keys.job_steps(JOB), start, 1_000):
                found.append(len(rows))
                start = f"({rows[-1][0]}"
        return found

    assert asyncio.run(pages()) == [2, 2, 2, 1]


def test_what_is_added_to_a_stream_while_it_is_closed_is_not_waited_for(
    controller: Controller, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any agent of the job may add faster than another one reads."""
    add_steps(controller, range(1, 1001))
    read, steps = NewestFirst.rows, itertools.count(1001)

    async def read_and_add(self: NewestFirst, *args: Any) -> Any:  # noqa: ANN401 as what it stands for
        found = await read(self, *args)
        add_steps(controller, itertools.islice(steps, 1000))
        return found

    monkeypatch.setattr(NewestFirst, "rows", read_and_add)
    assert closed_by(redis_url, tmp_path) == list(range(1, 1001))


def test_all_that_a_lost_node_had_not_written_yet_is_closed_however_much_it_is(
    controller: Controller, redis_url: str, tmp_path: Path
) -> None:
    """Of more than a thousand entries the first thousand were read; a user who may only read them got none.

    An answer may be so long that it never comes in time: fewer are asked for then.
    """
    add_steps(controller, range(1, 2501))
    assert closed_by(redis_url, tmp_path, in_time_up_to=300) == list(range(1, 2501))
