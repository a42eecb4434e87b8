"""Writes what this version keeps in Redis of jobs in every stage, for tests of versions that come later.

``python -m tests.controller.dump_records FILE``: run it before the format changes, and keep the file.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from redis import Redis

from services.contract.messages.telemetry import MetricRecord
from services.contract.redis import redis_keys as keys
from services.controller.api.guard import AccessPolicy
from services.local.embedded_redis import EmbeddedRedis
from tests.controller.conftest import ControlPlane, open_plane
from tests.waiting import until

_TIMED = ("ml:leader", "ml:rate:")


def make_jobs(plane: ControlPlane) -> None:
    """A job that succeeded after a restart, one that trains, one paused, one cancelled, one that waits."""
    plane.agent.join(slots=4)
    done = plane.submit(name="done", labels={"team": "a"})
    first = plane.agent.launches(done)
    plane.agent.trains(first, range(1, 4))
    plane.agent.writes(first, 0, "of attempt 1")
    plane.agent.saves(first, 3)
    plane.agent.ends(first, 4, exit_code=1, error="ValueError: of rank 0", traceback="Traceback")
    second = plane.agent.launches(done, fence=2)
    plane.agent.trains(second, range(4, 11))
    plane.agent.tells_metrics(second, MetricRecord(step=4, fence=2, values={"hits": 0.5}))
    plane.agent.saves(second, 10, number=4)
    plane.agent.ends(second, 10)
    plane.in_state(done, "SUCCEEDED")

    paused = plane.submit(name="paused")
    gang = plane.agent.launches(paused)
    plane.agent.trains(gang, range(1, 3))
    plane.in_state(paused, "RUNNING")
    plane.act(paused, "pause", {"checkpoint": "none"})
    plane.agent.ends(gang, 2, exit_code=0, drained=True)
    plane.in_state(paused, "PAUSED")

    trains = plane.submit(name="trains", train={"steps": 100})
    gang = plane.agent.launches(trains)
    plane.agent.trains(gang, range(1, 6))
    plane.in_state(trains, "RUNNING")
    plane.agent.saves(gang, 5)
    plane.agent.votes(gang, 6)

    cancelled = plane.submit(name="cancelled", resources={"ranks": 2})
    gang = plane.agent.launches(cancelled)
    plane.act(cancelled, "kill")
    plane.agent.ends(gang, 0, signal=9)
    plane.in_state(cancelled, "CANCELLED")
    plane.submit(name="waits", resources={"ranks": 4}, priority=3)
    until(lambda: plane.redis.llen(keys.FACT_SENDERS) == plane.redis.xlen(keys.FACTS) == 0)


def dump(redis: Redis) -> dict[str, Any]:
    """All keys but those that are held for seconds, as type and value."""
    reads: dict[str, Any] = {
        "string": redis.get,
        "hash": redis.hgetall,
        "set": lambda key: sorted(redis.smembers(key)),
        "list": lambda key: redis.lrange(key, 0, -1),
        "zset": lambda key: redis.zrange(key, 0, -1, withscores=True),
        "stream": redis.xrange,
    }
    found: Any = redis.keys("ml:*")
    kinds = {key: str(redis.type(key)) for key in sorted(found) if not key.startswith(_TIMED)}
    return {key: {"type": kind, "value": reads[kind](key)} for key, kind in kinds.items()}


def restore(redis: Redis, records: dict[str, Any]) -> None:
    """Write what ``dump`` read."""
    for key, record in records.items():
        value = record["value"]
        match record["type"]:
            case "hash":
                redis.hset(key, mapping=value)
            case "zset":
                redis.zadd(key, dict(value))
            case "set":
                redis.sadd(key, *value)
            case "list":
                redis.rpush(key, *value)
            case "string":
                redis.set(key, value)
            case "stream":
                for entry_id, fields in value:
                    redis.xadd(key, fields, id=entry_id)


def main() -> None:
    """Write the file."""
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedRedis.start(Path(folder)) as server,
        open_plane(server.url, AccessPolicy()) as plane,
    ):
        make_jobs(plane)
        jobs = plane.get("/v1/jobs?limit=200")["items"]
        told = {"jobs": {job["id"]: job for job in jobs}, "records": dump(plane.redis)}
    Path(sys.argv[1]).write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
