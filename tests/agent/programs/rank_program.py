"""A trainer without torch: real processes that step, fail, hang and checkpoint as a spec asks."""

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from misdeeds import MISDEEDS  # type: ignore[import-not-found]  # beside it on the user path

from services.contract.messages.board import BoardStep, BoardWriter
from services.contract.messages.rank_pipe import (
    RankCheckpointBegan,
    RankEvaluated,
    RankFinished,
    RankReady,
    RankSeat,
    RankVote,
)
from services.contract.storage.commit_chain import CommitChain
from services.contract.storage.manifests import ShardFile
from services.contract.words.ids import checkpoint_id
from services.worker.rank.process.seat import AgentPipe

_PTRACE_TRACEME: Final = 0


def train(*, seat: RankSeat, pipe: AgentPipe, board: BoardWriter, listen_fd: int | None) -> None:
    """Run the steps of the spec; what else happens is in ``spec.model.args``."""
    options: dict[str, Any] = seat.spec.model.args if seat.spec.model else {}
    if options.get("environment_to"):
        Path(options["environment_to"]).write_text(json.dumps(dict(os.environ)))  # noqa: TID251 what a rank sees
    pipe.send(RankReady(units=("blocks.0", ""), groups=("dp",), parameters=1, data_digest="d"))
    if options.get("child"):
        child = subprocess.Popen(
            [sys.executable, "-c", "import signal; signal.pause()"],
            start_new_session=options["child"] == "of its own session",
        )
        sys.stdout.write(f"child {child.pid}\n")
    for number in range(options.get("lines", 0)):
        sys.stdout.write(f"line {number}\n")
    steps = seat.spec.train.steps
    drained = False
    for step in range(1, steps + 1):
        _misbehave(options, seat.rank, step)
        if options.get("misdeed"):
            _do_wrong(options["misdeed"], seat, pipe, step)
        threading.Event().wait(options.get("pause_s", 0.0))
        board.finish_step(
            BoardStep(
                step,
                float(options.get("loss", 1 / step)),
                0.1 * step,
                1e-3 / 3,
                1000.0,
                0.01,
                memory_bytes=4096 + seat.rank,
                ended_ms=time.time_ns() // 1_000_000,
            ),
            peak_bytes=1024,
            fragments_bytes=512,
            now_ns=time.monotonic_ns(),
        )
        if options.get("evaluates") and seat.rank == 0:
            pipe.send(RankEvaluated(step=step, loss=1 / step, tokens=10))
        orders = pipe.poll_orders()
        if step == steps or any(order.checkpoint for order in orders):
            _checkpoint(seat, pipe, step, options.get("digest_of"))
        if any(order.stop for order in orders):
            drained = True
            break
    if seat.rank == 0:
        pipe.send(RankEvaluated(step=steps, loss=1.5, tokens=10, baselines={"bigram": 2.4}))
        assert (listen_fd is None) is (seat.rank != 0)
    pipe.send(RankFinished(step=board.snapshot.step, drained=drained))


def _do_wrong(deed: str, seat: RankSeat, pipe: AgentPipe, step: int) -> None:
    """What rank 1 does in its third step, once rank 0 has begun: else it might be rank 0 that fails of it."""
    begun = Path(seat.log_folder) / "begun"
    if (seat.rank, step) == (0, 1):
        begun.touch()
    if (seat.rank, step) == (1, 3):
        while not begun.exists():
            threading.Event().wait(0.01)
        MISDEEDS[deed](seat, pipe._end)


def _misbehave(options: dict[str, Any], rank: int, step: int) -> None:
    if step != options.get("at_step", 3) or rank != options.get("bad_rank", 1):
        return
    match options.get("then"):
        case "raise":
            raise ValueError("the model has a fault")
        case "lose_peer":
            raise RuntimeError("Connection closed by peer [127.0.0.1]:4242")
        case "exit":
            os._exit(7)
        case "hang":
            threading.Event().wait()
        case "stop" | "stop for its parent" as how:
            if how != "stop":
                ctypes.CDLL(None).ptrace(_PTRACE_TRACEME, 0, 0, 0)
            os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGUSR1)
        case other if other in _FAILURES:
            _FAILURES[other]()


def _aborts() -> None:
    sys.stderr.write("terminate called after throwing an instance of 'std::bad_alloc'\n")
    sys.stderr.flush()
    os.abort()


def _loses_a_thread() -> None:
    thread = threading.Thread(target=bytearray, args=(1 << 45,))
    thread.start()
    thread.join()
    raise RuntimeError("nothing came of it")


def _hides_a_refusal() -> None:
    try:
        bytearray(1 << 45)
    except MemoryError as error:
        raise RuntimeError("no batch") from error


def _raises_what_is_no_text() -> None:
    """As with the name of a file that is no UTF-8."""
    raise ValueError("no samples in a\udc80b")


_FAILURES: Final = {
    "take memory": lambda: bytearray(1 << 33),
    "fill memory": lambda: b"\1" * (3 << 30),
    "abort for memory": _aborts,
    "lose a thread": _loses_a_thread,
    "hide a refusal": _hides_a_refusal,
    "raise what is no text": _raises_what_is_no_text,
}


def _checkpoint(seat: RankSeat, pipe: AgentPipe, step: int, digest_of: str | None) -> None:
    name = checkpoint_id(seat.job_id, step, seat.fence)
    pipe.send(RankCheckpointBegan(checkpoint_id=name, step=step))
    folder = CommitChain(Path(seat.storage_root), seat.job_id).shard_folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    content = f"rank {seat.rank} step {step}".encode()
    path = folder / f"rank-{seat.rank}.bin"
    path.write_bytes(content)
    shard = ShardFile(
        rank=seat.rank,
        name=path.name,
        bytes=len(content),
        sha256=hashlib.sha256(digest_of.encode() if digest_of else content).hexdigest(),
    )
    pipe.send(RankVote(checkpoint_id=name, step=step, shard=shard, loss=1 / step))
