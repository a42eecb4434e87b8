"""``python -m services.controller.adapters.pools.ray_driver ADDRESS NAMESPACE``: what speaks to Ray.

Ray ends the process of a driver that has lost its cluster for a minute, so this is a process of its own. It
reads requests and writes answers, one line of JSON each: ``{"do": "sightings"}`` is answered by ``{"ok": …}``,
``{"refused": why}`` or ``{"failed": why}``; so is, without a request, the connection.

A reservation is a placement group named ``<namespace>.<pool>.<reservation>.<numbers of its nodes>`` with one bundle
a node, and in each bundle a detached actor that is never restarted. The actor supervises the same agent as everywhere:
the agent ends with it, and it ends with the agent.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

import ray
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_PARENT_DEATH_SIGNAL: Final = 1
_DOTS: Final = 3
_GONE: Final = frozenset({"REMOVED"})
_REASONS: Final = {
    "INFEASIBLE": "no cluster of Ray has so many nodes with these resources",
    "NO_RESOURCES": "not enough nodes of Ray are free",
    "FAILED_TO_COMMIT_RESOURCES": "Ray tries again to reserve the nodes",
    "QUEUED": "queued by Ray",
}


class Supervisor:
    """Starts an agent and ends with it. Ray runs it in a process on the node.

    Args:
        command: The agent's program and arguments.
        environment: Its variables, beside those of the node.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._agent = subprocess.Popen(  # noqa: S603 the operator's command
            list(command),
            env={**_of_node(os.environ), **environment},  # noqa: TID251 of the node, not of the controller
            stdin=subprocess.DEVNULL,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 nothing but a system call
            start_new_session=True,
        )
        threading.Thread(target=self._end_with_agent, daemon=True).start()

    def is_there(self) -> bool:
        """Answers once the agent was started."""
        return self._agent.returncode is None

    def stop(self, grace_s: float) -> None:
        """Tell the agent to end, and kill it if it has not within ``grace_s`` seconds."""
        self._agent.terminate()
        threading.Timer(grace_s, self._agent.kill).start()

    def _end_with_agent(self) -> None:
        os._exit(self._agent.wait() != 0)


def _of_node(variables: Mapping[str, str]) -> dict[str, str]:
    """Without what Ray sets for its own processes: the agent and its ranks are none of them."""
    return {name: value for name, value in variables.items() if not name.startswith("RAY_")}


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)


class Driver:
    """Carries out requests.

    Args:
        namespace: Of our actors; begins the names of our placement groups.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._handles: dict[str, list[Any]] = {}

    def provision(self, request: Mapping[str, Any]) -> None:
        """Ask for the nodes of a reservation, as far as that was not done."""
        name, pool = str(request["id"]), str(request["pool"])
        agents: dict[str, Any] = request["agents"]
        numbers = [node_id.removeprefix(f"{pool}-") for node_id in agents]
        title = ".".join((self._namespace, pool, name, ",".join(numbers)))
        known = self._groups(with_removed=True).get(title)
        if known is None:
            bundles = [dict(request["resources"]) for _ in agents]
            with contextlib.suppress(
                Exception
            ):  # another controller has just made it: looked for below
                placement_group(bundles, strategy="STRICT_SPREAD", name=title, lifetime="detached")
        elif known["state"] in _GONE:
            return  # it was given back meanwhile, which whoever asks does not know yet
        group = ray.util.get_placement_group(title)
        handles = []
        for index, (node_id, agent) in enumerate(agents.items()):
            actor = ray.remote(Supervisor).options(
                name=f"{name}.{node_id}",
                namespace=self._namespace,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=0,
                max_concurrency=2,
                num_cpus=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                ),
            )
            handles.append(actor.remote(agent["command"], agent["environment"]))
        self._handles[name] = handles

    def sightings(self, request: Mapping[str, Any]) -> list[dict[str, object]]:
        """All reservations of a pool."""
        pool = str(request["pool"])
        seen: list[dict[str, object]] = []
        for title, row in self._groups().items():
            _, of_pool, name, numbers = title.split(".")
            if of_pool != pool:
                continue
            node_ids = [f"{pool}-{number}" for number in numbers.split(",")]
            missing = [node_id for node_id in node_ids if not self._has(name, node_id)]
            state = str(row["state"])
            words = row["stats"]["scheduling_state"]
            reason = "" if state == "CREATED" else _REASONS.get(words, words)
            if missing:
                reason = f"the agent of {', '.join(missing)} has ended, or its node is gone"
            seen.append(
                {"id": name, "node_ids": node_ids, "is_whole": not missing, "reason": reason}
            )
        return seen

    def release(self, request: Mapping[str, Any]) -> None:
        """Tell the agents of a reservation to end; remove it once they have, or at once if ``now``."""
        name = str(request["id"])
        for title, row in self._groups().items():
            _, pool, of_title, numbers = title.split(".")
            if of_title != name:
                continue
            alive = [n for n in numbers.split(",") if self._has(name, f"{pool}-{n}")]
            if alive and row["state"] == "CREATED" and not request["now"]:
                for number in alive:
                    actor = ray.get_actor(f"{name}.{pool}-{number}", self._namespace)
                    actor.stop.remote(request["grace_s"])
                continue
            remove_placement_group(ray.util.get_placement_group(title))
        self._handles.pop(name, None)

    def _groups(self, *, with_removed: bool = False) -> dict[str, Any]:
        return {
            row["name"]: row
            for row in placement_group_table().values()
            if row["name"].startswith(f"{self._namespace}.")
            and row["name"].count(".") == _DOTS  # others may name theirs as they like
            and (with_removed if row["state"] in _GONE else self._is_of_namespace(row))
        }

    def _is_of_namespace(self, row: Mapping[str, Any]) -> bool:
        """Whether a group is ours to release. Ray lists those of all namespaces, and finds by name those of one."""
        try:
            known = ray.util.get_placement_group(row["name"])
        except ValueError:
            return False
        return bool(known.id.hex() == row["placement_group_id"])

    def _has(self, name: str, node_id: str) -> bool:
        try:
            ray.get_actor(f"{name}.{node_id}", self._namespace)
        except ValueError:
            return False
        return True


def main() -> None:
    """Serve requests until there are no more."""
    address, namespace = sys.argv[1:]
    # Ray writes to stdout, too: answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        ray.init(address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # noqa: BLE001 whatever it is, the controller tells it
        print(json.dumps({"failed": _said(error)}), file=answers)
        return
    # A worker of Ray need not have this package, if the agent's command has.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call] # Ray's
    print(json.dumps({"ok": None}), file=answers)
    driver = Driver(namespace)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"ok": getattr(driver, request["do"])(request)}
        except ValueError as error:
            answer = {"refused": _said(error)}
        except Exception as error:  # noqa: BLE001 whatever it is, the controller tells it
            answer = {"failed": _said(error)}
        print(json.dumps(answer), file=answers)


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}"


if __name__ == "__main__":
    main()
