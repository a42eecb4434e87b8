"""A program of the agent's: what this node's devices do in a second.

As many processes as the node seats ranks work at once, each with the threads that a rank would have
then, for a rank alone on a node is faster than one among others. Each figure is that of the
slowest, for which the others wait in every step.
"""

import os
import socket
import time
from datetime import timedelta
from typing import Final, NoReturn, cast

import torch
import torch.distributed as dist

from fsdp_core.comm.collectives import GroupCollectives
from services.contract.messages.probe_programs import SelfTestResult, SelfTestSeat
from services.worker.rank.probe.measuring import MATRIX_WIDTH, MeasuringRank, node_facts
from services.worker.rank.process.probe_program import Question
from services.worker.rank.process.warm import die_with_parent

MOST_PROCESSES: Final = 16
_LOOPBACK: Final = "127.0.0.1"
_MEETING_TIME: Final = timedelta(minutes=1)
_UNKNOWN_NETWORK: Final = "not measured: this is the rate between processes of this node by TCP"


def main(asked: Question) -> NoReturn:
    """Answer the agent's question."""
    seat = SelfTestSeat.model_validate_json(asked.question)
    began = time.monotonic()
    processes = working_processes(seat)
    threads = max(1, seat.processors // processes)
    this = _fork(seat, processes)
    torch.set_num_threads(threads)
    facts = node_facts(this, seat.seats, processes)
    if this.rank:
        os._exit(0)
    asked.reply(
        SelfTestResult(
            facts=facts,
            detail={
                "processes": processes,
                "threads": threads,
                "matrix_width": MATRIX_WIDTH[seat.device_type],
                "network_bandwidth": _UNKNOWN_NETWORK,
                "took_s": round(time.monotonic() - began, 3),
            },
        )
    )


def working_processes(seat: SelfTestSeat) -> int:
    """How many processes compute at a time: one a rank, where each has a device or a processor."""
    if seat.device_type == "cuda":
        return seat.seats
    return min(seat.seats, seat.processors, MOST_PROCESSES)


def _fork(seat: SelfTestSeat, processes: int) -> MeasuringRank:
    """Become several processes, this one the first, that have met; none has used its device yet."""
    world = max(2, processes)  # where one rank is seated, a second process is there to be sent to
    first = os.getpid()
    with socket.create_server((_LOOPBACK, 0), backlog=world) as listening:
        port = listening.getsockname()[1]
        rank = next((number for number in range(1, world) if os.fork() == 0), 0)
        if rank:
            die_with_parent(first)
        store = dist.TCPStore(  # type: ignore[attr-defined]  # PyTorch exports it implicitly
            _LOOPBACK,
            port,
            world,
            is_master=rank == 0,
            timeout=_MEETING_TIME,
            wait_for_workers=False,
            master_listen_fd=listening.detach() if rank == 0 else None,
        )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    return MeasuringRank(rank, seat.device_type, _device(seat, rank), *_groups(seat, processes))


def _device(seat: SelfTestSeat, rank: int) -> torch.device | None:
    if rank >= working_processes(seat):
        return None
    if seat.device_type == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def _groups(seat: SelfTestSeat, processes: int) -> tuple[GroupCollectives, GroupCollectives | None]:
    """That of all processes on the host, and that through which ranks would exchange their data."""
    host = GroupCollectives("host", cast("dist.ProcessGroup", dist.group.WORLD))
    if processes == 1:
        return host, None
    if seat.device_type == "cpu":
        return host, host
    return host, GroupCollectives("devices", dist.new_group(backend="nccl"))
