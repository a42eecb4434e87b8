"""Redis's users: ``python -m services.controller.acl [--last-release] NODE[=FILE]…`` prints the file for ``aclfile``.

The controllers' password comes from ``MESHLOOM_REDIS_CONTROLLER_PASSWORD``, or from the file that
``MESHLOOM_REDIS_CONTROLLER_PASSWORD_FILE`` names. Every node has a user of
its own, ``agent-<node id>``, whose password stands in FILE; without one it is
``MESHLOOM_REDIS_AGENT_PASSWORD``, which lets each of the nodes that share it speak as any other of
them. The output holds digests alone.

A command is allowed where one rule allows both it and its keys; a script's own commands are checked
like any others. So an agent reads the fence of a job's record, and cannot write it, neither by itself
nor in a script of its own.
"""

import argparse
import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NoReturn

from pydantic import TypeAdapter, ValidationError

from services.contract.redis import redis_keys as keys
from services.contract.words.ids import NodeId
from services.controller.settings import MIN_PASSWORD_CHARACTERS, AclSettings

_NODE_ID: Final = TypeAdapter(NodeId)
_BAD_ARGUMENTS: Final = 2
_ANY_JOB: Final = f"job_{'?' * 26}"
_ANY_DIGEST: Final = "?" * 64
# An agent finds the keys of the jobs whose secret its controller told it. Without a setting there is none.
_ANY_SECRET: Final = "?" * 32
# By category: which commands it has differs between versions, and an unknown one stops the server.
# Tracking would tell the names of all keys that change, whatever the keys of the user are.
_CONNECTION: Final = "+@connection +time -@dangerous -@admin -client|tracking"
_TRANSACTION: Final = "+multi +exec +discard +watch +unwatch"


def acl_file(
    controller: str, agents: Iterable[tuple[str, str]], *, last_release: bool = False
) -> str:
    """The users of a Redis that only Meshloom uses; needs Redis 7.

    Args:
        controller: The controllers' password.
        agents: Node ids, each with its agent's password.
        last_release: Agents of the last release may tell facts, too, in the name of any node.
    """
    lines = [
        # It is off, so that no client can be this user. Redis itself is, when it loads its append-only
        # file, and checks EXEC against these rights: without them all transactions would be lost
        # (Redis before the fix of its issue 14541).
        "user default off resetpass ~* &* +@all",
        _controller(controller),
        *(_agent(node_id, password, last_release) for node_id, password in agents),
    ]
    return "\n".join(lines) + "\n"


def _controller(password: str) -> str:
    # All of the data, nothing of the server: no CONFIG, ACL, FLUSHALL, KEYS, MODULE, DEBUG.
    return (
        f"user controller on {_digest(password)} resetkeys ~ml:* resetchannels &{keys.WAKE} "
        f"-@all +@read +@write +@scripting +@transaction +@pubsub {_CONNECTION}"
    )


def _agent(node_id: str, password: str, last_release: bool) -> str:  # noqa: FBT001 of this module alone
    return " ".join(
        [
            f"user agent-{node_id} on {_digest(password)} resetkeys resetchannels &{keys.WAKE}",
            f"-@all {_CONNECTION} {_TRANSACTION} +publish +script|load",
            *(f"({rule})" for rule in _agent_rules(node_id)),
            *([f"(+rpush %W~{keys.ARRIVED_FACTS})"] if last_release else []),
        ]
    )


def _agent_rules(node_id: str) -> Iterator[str]:
    """What an agent may do to which keys."""
    own = [keys.node_lease(node_id), keys.node_beat(node_id), keys.node_inbox(node_id)]
    told = [
        key(name)
        for name in (_ANY_JOB, keys.telemetry_name(_ANY_JOB, _ANY_SECRET))
        for key in (
            *(keys.job_ranks, keys.job_steps, keys.job_metrics, keys.job_logs),
            *(keys.recalled, keys.recalled_steps, keys.recalled_metrics),
            *(keys.recalled_logs, keys.recalled_events),
        )
    ]
    record = keys.job(_ANY_JOB)
    # Running a script takes all rights on the keys that it names; what it does to them is judged
    # by the rules below.
    named = [*own, *told, record, keys.DELETED_JOBS]
    yield f"+eval +evalsha {_patterns(named)}"
    # Those without a key would show the names of all.
    keyless = "-scan -randomkey -dbsize"
    yield f"+@string +@keyspace +@hash +@stream -@dangerous {keyless} {_patterns(own)}"
    yield f"+hget +hmget %R~{record}"
    yield f"+sismember %R~{keys.DELETED_JOBS}"
    yield f"+hset +hget +hmget +xadd +xrevrange +xrange {_patterns(told)}"
    yield f"+xrange %R~{keys.job_events(_ANY_JOB)}"
    yield f"+hget %R~{keys.code(_ANY_DIGEST)}"
    # A fact in its own list, and that it has one in the order of all.
    yield f"+rpush %W~{keys.node_facts(node_id)} %W~{keys.FACT_SENDERS}"


def _patterns(names: Iterable[str]) -> str:
    return " ".join(f"~{name}" for name in names)


def _digest(password: str) -> str:
    return f"#{hashlib.sha256(password.encode()).hexdigest()}"


def main() -> None:
    """Print the file. Ends with code 2 if a password or a node id is wrong."""
    parser = argparse.ArgumentParser(prog="python -m services.controller.acl")
    parser.add_argument(
        "nodes", nargs="+", metavar="NODE[=FILE]", help="a node, and its password's file"
    )
    parser.add_argument(
        "--last-release",
        action="store_true",
        help="agents of the last release may tell facts, too, each in the name of any node: until all are upgraded",
    )
    asked = parser.parse_args()
    # Redis takes no user twice.
    nodes = dict(name.partition("=")[::2] for name in asked.nodes)
    try:
        settings = AclSettings()
    except ValidationError as error:
        _refuse(_faults(error, ""))
    try:
        agents = [
            (_NODE_ID.validate_python(name), _password(settings, file))
            for name, file in nodes.items()
        ]
    except ValidationError as error:
        _refuse(_faults(error, "NODE: "))
    except (OSError, ValueError) as error:
        _refuse(str(error))
    controller = settings.redis_controller_password.get_secret_value()
    sys.stdout.write(acl_file(controller, agents, last_release=asked.last_release))


def _faults(error: ValidationError, otherwise: str) -> str:
    """What is wrong, each with its setting's name; ``otherwise`` before what is of no single one."""
    texts = []
    for fault in error.errors(include_url=False, include_input=False):
        where = ".".join(map(str, fault["loc"]))
        said = str(fault["msg"]).removeprefix("Value error, ")
        texts.append(f"{where}: {said}" if where else f"{otherwise}{said}")
    return "; ".join(texts)


def _password(settings: AclSettings, file: str) -> str:
    if file:
        text = Path(file).read_text().strip()
    elif settings.redis_agent_password is not None:
        text = settings.redis_agent_password.get_secret_value()
    else:
        raise ValueError(
            "a node needs a password: give NODE=FILE, or set MESHLOOM_REDIS_AGENT_PASSWORD"
        )
    if len(text) < MIN_PASSWORD_CHARACTERS:
        raise ValueError(f"a password has fewer than {MIN_PASSWORD_CHARACTERS} characters")
    return text


def _refuse(text: str) -> NoReturn:
    sys.stderr.write(f"acl: {text}\n")
    sys.exit(_BAD_ARGUMENTS)


if __name__ == "__main__":
    main()
