"""The two residents of the ports, Redis and the twin in memory, and what tests keep in them."""

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import pytest
from redis import Redis

from fsdp_core.plan.model import Conditions
from services.contract.jobs.code_archives import digest_of
from services.contract.messages.commands import COMMAND, Command
from services.contract.messages.probing import MeasureNode, ProbeModel
from services.contract.messages.telemetry import MetricRecord, StepRecord
from services.contract.redis import redis_keys as keys
from services.contract.words.ids import new_job_id, new_plan_id
from services.controller.adapters.memory import memory_ports
from services.controller.adapters.memory.server import MemoryServer
from services.controller.adapters.redis import redis_ports
from services.controller.domain.access.code import UploadedCode
from services.controller.domain.decisions.dispatch import first_decision
from services.controller.domain.job.effects import Send
from services.controller.domain.job.job import Job
from services.controller.domain.plans.plan import Plan
from services.controller.domain.scheduling.node import Lease
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Actor, Claim, Quota, Stored
from services.controller.ports.machines import Log
from tests.controller.agent_double import append_fact
from tests.controller.histories import NODE, spec

ACTOR = Actor("test", "req-1")


class Outside(Protocol):
    """What other processes write and read, past the ports."""

    def fact(self, body: str, sender: str) -> None: ...
    def fact_of_the_last_release(self, body: str) -> None: ...
    def lease(self, node_id: str, incarnation: str) -> None: ...
    def step(self, job_id: str, record: StepRecord) -> None: ...
    def metric(self, job_id: str, record: MetricRecord) -> None: ...
    def output(self, job_id: str, body: str) -> None: ...
    def trim(self, job_id: str) -> None: ...
    def inbox(self, node_id: str) -> list[Command]: ...


@dataclass
class OutsideRedis:
    redis: Redis

    def fact(self, body: str, sender: str) -> None:
        append_fact(self.redis, sender, body)

    def fact_of_the_last_release(self, body: str) -> None:
        self.redis.rpush(keys.ARRIVED_FACTS, body)

    def lease(self, node_id: str, incarnation: str) -> None:
        self.redis.set(keys.node_lease(node_id), incarnation, px=5000)

    def step(self, job_id: str, record: StepRecord) -> None:
        self.redis.xadd(keys.job_steps(job_id), {keys.MESSAGE_FIELD: record.model_dump_json()})

    def metric(self, job_id: str, record: MetricRecord) -> None:
        self.redis.xadd(keys.job_metrics(job_id), {keys.MESSAGE_FIELD: record.model_dump_json()})

    def output(self, job_id: str, body: str) -> None:
        self.redis.xadd(keys.job_logs(job_id), {keys.MESSAGE_FIELD: body})

    def trim(self, job_id: str) -> None:
        self.redis.xtrim(keys.job_logs(job_id), maxlen=1, approximate=False)

    def inbox(self, node_id: str) -> list[Command]:
        entries = self.redis.xrange(keys.node_inbox(node_id)) or []
        return [COMMAND.validate_json(f[keys.MESSAGE_FIELD]) for _, f in entries if f]


@dataclass
class OutsideMemory:
    server: MemoryServer

    def fact(self, body: str, sender: str) -> None:
        self.server.tell(body, sender)

    def fact_of_the_last_release(self, body: str) -> None:
        self.server.tell(body)

    def lease(self, node_id: str, incarnation: str) -> None:
        self.server.leases[node_id] = Lease(incarnation, 5000)

    def step(self, job_id: str, record: StepRecord) -> None:
        self.server.steps[job_id].append(record)

    def metric(self, job_id: str, record: MetricRecord) -> None:
        self.server.metrics[job_id].append(record)

    def output(self, job_id: str, body: str) -> None:
        self.server.logs[job_id, Log.OUTPUT].append(self.server.entry(body))

    def trim(self, job_id: str) -> None:
        del self.server.logs[job_id, Log.OUTPUT][:-1]

    def inbox(self, node_id: str) -> list[Command]:
        return self.server.commands(node_id)


@dataclass
class World:
    ports: Ports
    outside: Outside

    async def keep(self, job: Job, claim: Claim | None = None) -> Stored:
        return await self.ports.jobs.create(first_decision(job), ACTOR, claim)


def job(created_ms: int = 5, name: str = "job") -> Job:
    return Job(
        id=new_job_id(created_ms, os.urandom(10)),
        spec=spec(name=name),
        created_ms=created_ms,
        updated_ms=created_ms,
    )


async def with_quota(
    resident: str, request: pytest.FixtureRequest, quota: Quota
) -> AsyncIterator[Ports]:
    if resident == "memory":
        yield memory_ports(MemoryServer(now_ms=lambda: 1), quota)
        return
    async with redis_ports(request.getfixturevalue("redis_url"), quota=quota) as ports:
        yield ports


def plan(number: int = 0) -> Plan:
    now = 1_000_000
    return Plan(
        id=new_plan_id(now + number, bytes(10)),
        spec=spec(),
        device_type="cpu",
        probe_id=QUESTION.probe_id,
        node_id=NODE,
        created_ms=now,
        answer_by_ms=now + 60_000,
    )


QUESTION = ProbeModel(
    probe_id=f"probe_{'0' * 32}", spec=spec(), device_type="cpu", conditions=(Conditions(),)
)


ASK = Send(NODE, QUESTION)


ASK_ID = QUESTION.probe_id


MEASURE = Send(NODE, MeasureNode(device_type="cpu"))


def uploaded(body: bytes, subject: str = "alice") -> UploadedCode:
    return UploadedCode(
        digest=digest_of(body),
        bytes=len(body),
        files=1,
        unpacked_bytes=len(body),
        uploaded_by=subject,
        uploaded_ms=1,
    )
