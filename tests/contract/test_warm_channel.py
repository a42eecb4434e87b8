"""A request that the warm process cannot read is refused, and the next one is answered."""

import json
import os
import socket
from typing import Any

import pytest
from pydantic import ValidationError

from services.contract.messages.warm_channel import ForkFailed, ForkRank, WarmChannel

SEAT: dict[str, Any] = {
    "job_id": "job_01hzxw3v8q000000000000000a",
    "fence": 1,
    "rank": 3,
    "local_rank": 3,
    "device": "cpu",
    "spec": {
        "model": {"factory": "decoder"},
        "data": {"factory": "stdlib_bytes"},
        "train": {"steps": 1},
    },
    "plan": {
        "device_type": "cpu",
        "sharding": {"mesh": {"dp_shard": 1}},
        "ranks": [{"rank": 0, "node_id": "loom-1", "local_rank": 0, "device": "cpu"}],
    },
    "storage_root": "/s",
    "board_path": "/b",
    "log_folder": "/l",
    "store_host": "::1",
    "store_port": 1,
    "threads": 1,
}


def line(**changes: object) -> bytes:
    request = {"kind": "fork_rank", "descriptors": 2, "seat": SEAT | changes}
    return json.dumps(request).encode() + b"\n"


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize("unreadable", [{"spec": nested(250)}, {"threads": 0}])
def test_a_request_that_cannot_be_read_is_refused_and_the_next_is_taken(
    unreadable: dict[str, Any],
) -> None:
    ours, theirs = socket.socketpair()
    agent, warm = WarmChannel(ours), WarmChannel(theirs)
    first, second = socket.socketpair()
    with first, second:
        socket.send_fds(ours, [line(**unreadable)], [first.fileno()] * 2)
        assert warm.receive() == []
        socket.send_fds(ours, [line()], [second.fileno()] * 2)
        ((request, descriptors),) = warm.receive()
        assert isinstance(request, ForkRank)
        # Those of the refused request are closed, not handed to its successor.
        for descriptor in descriptors:
            assert os.path.sameopenfile(descriptor, second.fileno())
            os.close(descriptor)
    ((refusal, _),) = agent.receive()
    assert isinstance(refusal, ForkFailed)
    assert refusal.rank == 3
    assert "cannot be read" in refusal.reason
    agent.close()
    warm.close()


def test_a_line_that_is_no_request_is_a_fault_of_the_program() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        warm = WarmChannel(theirs)
        ours.sendall(b'{"kind": "what"}\n')
        with pytest.raises(ValidationError):
            warm.receive()
        warm.close()
