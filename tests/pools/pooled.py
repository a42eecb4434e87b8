"""A controller without any node, and a pool that may bring some: what the tests of jobs on pools share."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import psutil

from services.contract.api.queue import ReservationView
from services.contract.words.states import ReservationState
from services.controller.adapters.pools import open_pools
from services.controller.ports.pools import AgentProcess
from services.worker.agent.host.folders import NodeFolder
from services.worker.agent.host.processes import marked
from tests.cluster import Cluster
from tests.parts import ROOT
from tests.waiting import until

_AGAIN: Final = "launched-again"
_PATIENCE_S: Final = 300.0
_FILE: Final = "pools.yaml"
_LOST: Final = ReservationState.LOST
CHECKPOINTS: Final = {"checkpoint": {"every_steps": 3}}
LAST_CHECKPOINT: Final = {"checkpoint": {"every_steps": 100_000}}


@contextlib.contextmanager
def pooled(
    folder: Path, pool: Mapping[str, object], environment: Mapping[str, str], **settings: str
) -> Iterator[Cluster]:
    """The cluster; its pool's nodes take one CPU rank each.

    Args:
        folder: Empty, for all files.
        pool: As in the pools file, over what is common.
        environment: Of agents, over what is common.
        settings: More variables of the controller.
    """
    common: dict[str, object] = {"name": "hpc", "cpu_slots": 1, "idle_timeout_s": 2}
    agent = {
        "command": [sys.executable, "-m", "services.worker.agent"],
        "environment": {
            "MESHLOOM_REDIS_URL": "${MESHLOOM_REDIS_URL}",
            "MESHLOOM_HOME": f"{folder}/homes/${{node_id}}",
            "MESHLOOM_MEASURE_IDLE_S": "0",
            "MESHLOOM_CHECKPOINT_ROOT": f"{folder}/checkpoints",
            "MESHLOOM_ADDRESS": "127.0.0.1",
            "MESHLOOM_USER_PATH": f"{ROOT}/tests/chaos/user_models",
            **environment,
        },
    }
    file = folder / _FILE
    file.write_text(json.dumps({"agent": agent, "pools": [{**common, **pool}]}))  # JSON is YAML
    with Cluster(folder, {}, {}, MESHLOOM_POOLS_FILE=str(file), **settings) as cluster:
        yield cluster


def reservations(cluster: Cluster) -> tuple[ReservationView, ...]:
    """Those of its pool."""
    (pool,) = cluster.client.pools().items
    return pool.reservations


def only_ready_one(cluster: Cluster) -> ReservationView:
    """The reservation of its pool once there is but one, and its nodes are there."""

    def look() -> ReservationView | None:
        found = reservations(cluster)
        states = [each.state for each in found]
        return found[0] if states == [ReservationState.READY] else None

    return until(look)


def launch_again(
    cluster: Cluster,
    reservation: ReservationView,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Ask the pool for another node of the name of this one's first, as if Redis had lost its record.

    Args:
        cluster: The cluster.
        reservation: All its agents run.
        variables: With which the controller finds the scheduler.
    """
    known = {**variables, "MESHLOOM_REDIS_URL": cluster.redis_url}
    (own,) = open_pools(cluster.folder / _FILE, known)
    name = reservation.node_ids[0]
    agent = own.agents[name]
    words = ("sh", "-c", 'exec "$0" "$@" 2>"$SAID"', *agent.command)
    changes = {"MESHLOOM_HOME": f"{cluster.folder}/again", "SAID": f"{cluster.folder}/again.log"}

    begun = Path(changes["SAID"])

    async def ask() -> None:
        process = AgentProcess(words, {**agent.environment, **changes})
        await own.pool.provision(_AGAIN, {name: process})
        # On a busy machine a scheduler may take minutes for a further agent; nobody else asks again meanwhile.
        await asyncio.to_thread(until, begun.exists, timeout_s=_PATIENCE_S)
        await own.pool.close()

    # It would give back what is asked for half.
    controller = psutil.Process(cluster.controller.pid)
    controller.suspend()
    asyncio.run(ask())
    controller.resume()


def again_gave_up(cluster: Cluster) -> None:
    """Wait until the second agent of the node has said why it ends, and its reservation has ended."""

    def ended() -> bool:
        (pool,) = cluster.client.pools().items
        return any(each.id == _AGAIN for each in pool.ended)

    until(ended)
    said = (cluster.folder / "again.log").read_text()
    assert "meshloom agent: node id hpc-1 is in use by another agent" in said, said


def lost_by(cluster: Cluster, *words: str) -> None:
    """One reservation was lost: it says so in any of these words, or that its lease told of that first."""

    def look() -> ReservationView | None:
        (pool,) = cluster.client.pools().items
        lost = (each for each in pool.ended if each.id != _AGAIN and each.state is _LOST)
        return next(lost, None)

    (pool,) = cluster.client.pools().items
    lost = until(look)
    assert lost.reason.startswith((*words, f"{pool.name}-")), lost.reason
    assert lost.ended_at is not None


def of_agents(cluster: Cluster) -> list[psutil.Process]:
    """Live processes that the agents of its pool have started: templates and ranks."""
    homes = (cluster.folder / "homes").iterdir()
    return [each for home in homes for each in marked(NodeFolder(home, home.name).mark)]
