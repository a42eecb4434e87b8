"""What a hostile rank does to its board, its pipe and its files, by name."""

import contextlib
import ctypes
import itertools
import os
import signal
import socket
import struct
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from services.contract.messages.rank_pipe import RankSeat
from services.contract.system.pipe_end import PipeEnd
from services.contract.words.ids import checkpoint_id

_Deed = Callable[[RankSeat, PipeEnd], None]
_SNAPSHOT: Final = struct.Struct("<Qqqqqqqqddd16q")
_PR_SET_NAME: Final = 15
_PR_SET_PTRACER: Final = 0x59616D61
_PTRACE_TRACEME: Final = 0
_PTRACE_SEIZE: Final = 0x4206
_PTRACE_O_TRACEEXIT: Final = 0x40
_IN_ACCESS: Final = 0x1
_libc = ctypes.CDLL(None, use_errno=True)
_EVALUATED: Final = b'{"kind":"rank_evaluated","step":%d,"loss":1,"tokens":1}\n'
OTHERS_CHECKPOINT: Final = "ckpt_01hf7yat00000000000000zzzz-s000000003-a0001"


def _write(pipe: PipeEnd, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(pipe.writing, left) :]


def _board(
    phase: int = 6, unit: int = -1, step_s: float = 0.0, sequence: int = 0
) -> Callable[[RankSeat, PipeEnd], None]:
    def write(seat: RankSeat, _: PipeEnd) -> None:
        figures = (*[0] * 3, 0.0, 0.0, step_s, *[sequence] * 16)
        record = _SNAPSHOT.pack(2**63, 1, phase, unit, 3, *figures)
        with Path(seat.board_path).open("r+b") as file:
            file.seek(64)
            file.write(record + struct.pack("<Q", zlib.crc32(record)))
        threading.Event().wait()

    return write


def _resized(size: int) -> Callable[[RankSeat, PipeEnd], None]:
    def resize(seat: RankSeat, _: PipeEnd) -> None:
        # By another process while this one is stopped: a store into its own map of a board that is
        # cut, such as the pulse, would end it before its agent looks.
        rank = os.getpid()
        if os.fork() == 0:
            while Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                os.sched_yield()
            os.truncate(seat.board_path, size)
            os._exit(0)
        os.kill(rank, signal.SIGSTOP)

    return resize


def _says(content: bytes, times: int | None = 1) -> Callable[[RankSeat, PipeEnd], None]:
    def say(_: RankSeat, pipe: PipeEnd) -> None:
        for _time in itertools.repeat(None) if times is None else range(times):
            _write(pipe, content)
        threading.Event().wait()

    return say


def _vote_for_another_rank(seat: RankSeat, pipe: PipeEnd) -> None:
    name = checkpoint_id(seat.job_id, 3, seat.fence)
    shard = b'{"rank":0,"name":"rank-0.bin","bytes":1,"sha256":"%064d"}' % 0
    said = b'{"kind":"rank_vote","checkpoint_id":"%s","step":3,"shard":%s}\n'
    _says(said % (name.encode(), shard))(seat, pipe)


def _leaves(content: bytes) -> Callable[[RankSeat, PipeEnd], None]:
    """It leaves with code 7; a process of a session of its own goes on to write."""

    def leave(_: RankSeat, pipe: PipeEnd) -> None:
        if os.fork() == 0:
            os.setsid()
            while True:
                _write(pipe, content)
                os.write(1, b"still here\n")
        os._exit(7)

    return leave


def _leaves_a_stranger(seat: RankSeat, _: PipeEnd) -> None:
    """A process of a session of its own, with no parent, mark or end, which holds nothing of ours."""
    stranger = Path(seat.log_folder) / "stranger"
    code = (
        "import os, pathlib, signal, sys; "
        "path = pathlib.Path(sys.argv[1]); "
        "path.with_suffix('.draft').write_text(str(os.getpid())); "
        "path.with_suffix('.draft').replace(path); "
        "signal.pause()"
    )
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(3, 1024)
            os.execve(sys.executable, [sys.executable, "-c", code, str(stranger)], {})  # noqa: S606 no shell
        os._exit(0)
    while not stranger.exists():
        os.sched_yield()
    os._exit(7)


def _spoils_its_log(_seat: RankSeat, _: PipeEnd) -> None:
    os.write(1, b"a line\n" * 10_000)
    threading.Event().wait(0.5)  # its agent follows
    os.ftruncate(1, 0)
    os._exit(7)


def _cuts_its_log_while_it_is_read(seat: RankSeat, _: PipeEnd) -> None:
    """It is long, at no cost, until its agent begins to read it."""
    watch = _libc.inotify_init()
    log = Path(seat.log_folder) / f"rank-{seat.rank}.stdout.log"
    _libc.inotify_add_watch(watch, os.fsencode(log), _IN_ACCESS)
    os.ftruncate(1, 60 << 20)
    os.read(watch, 4096)
    os.ftruncate(1, 0)
    os._exit(7)


def _puts_a_pipe_in_place_of_its_log(seat: RankSeat, _: PipeEnd) -> None:
    log = Path(seat.log_folder) / f"rank-{seat.rank}.stdout.log"
    log.unlink()
    os.mkfifo(log)
    os._exit(7)


def _replaces(what: Callable[[RankSeat], Path], by: Callable[[Path], object]) -> _Deed:
    """It puts something in the place of a folder of its own, and leaves."""

    def replace(seat: RankSeat, _: PipeEnd) -> None:
        path = what(seat)
        path.rename(path.with_name(f"{path.name}-before"))
        by(path)
        os._exit(7)

    return replace


def _points_elsewhere(path: Path) -> None:
    elsewhere = path.with_name(f"{path.name}-elsewhere")
    elsewhere.mkdir()
    path.symlink_to(elsewhere)


def _log_folder(seat: RankSeat) -> Path:
    return Path(seat.log_folder)


def _board_folder(seat: RankSeat) -> Path:
    return Path(seat.board_path).parent


def _storage(seat: RankSeat) -> Path:
    return Path(seat.storage_root) / seat.job_id


def _chain(seat: RankSeat) -> Path:
    return _storage(seat) / "chain"


def _hands_over_what_takes_an_hour_to_close(_: RankSeat, pipe: PipeEnd) -> None:
    """A connection that lingers for what nobody reads; whoever has it last and closes it, waits."""
    listener = socket.create_server(("127.0.0.1", 0))
    lingering = socket.create_connection(listener.getsockname())
    lingering.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
    lingering.settimeout(0)
    with contextlib.suppress(BlockingIOError):
        while True:
            lingering.send(bytes(1 << 20))
    try:
        channel = socket.socket(fileno=os.dup(pipe.writing))
    except OSError:  # it is none
        os._exit(7)
    # So much before it that its agent does not read it before it is closed here.
    channel.sendall(_EVALUATED % 3 * 700)
    socket.send_fds(channel, [_EVALUATED % 3], [lingering.fileno()])
    lingering.close()
    threading.Event().wait()


def _hangs_up(_: RankSeat, pipe: PipeEnd) -> None:
    pipe.close()
    threading.Event().wait(0.5)  # it trains on
    os._exit(7)


def _writes_past_its_agent(seat: RankSeat, _: PipeEnd) -> None:
    """Whenever its agent starts its log over, a pipe is in the way of what is kept."""
    kept = Path(seat.log_folder) / f"rank-{seat.rank}.stdout.log.1"

    def stand_in_the_way() -> None:
        while True:
            with contextlib.suppress(FileExistsError):
                os.mkfifo(kept)

    threading.Thread(target=stand_in_the_way, daemon=True).start()
    for _time in range(70):
        os.write(1, b"x" * (1 << 20))
    threading.Event().wait(1.0)
    os._exit(7)


def _calls_itself_what_is_no_text(seat: RankSeat, pipe: PipeEnd) -> None:
    _libc.prctl(_PR_SET_NAME, b"\xff) Z \xfe", 0, 0, 0)
    _says(b"not a message\n")(seat, pipe)


def _is_traced(options: int) -> _Deed:
    """A process that it started, in a session of its own, traces it and never looks at its end."""

    def leave(_seat: RankSeat, _: PipeEnd) -> None:
        rank = os.getpid()
        _libc.prctl(_PR_SET_PTRACER, -1, 0, 0, 0)
        if os.fork() == 0:
            os.setsid()
            os.closerange(3, 1024)
            _libc.ptrace(_PTRACE_SEIZE, rank, 0, options)
            threading.Event().wait()
        while "TracerPid:\t0" in Path("/proc/self/status").read_text():
            os.sched_yield()
        os._exit(7)

    return leave


def _makes_its_parent_its_tracer(_seat: RankSeat, _: PipeEnd) -> None:
    rank = os.getpid()
    if os.fork() == 0:
        while b"State:\tt" not in Path(f"/proc/{rank}/status").read_bytes():
            os.sched_yield()
        os.kill(rank, signal.SIGKILL)
        os._exit(0)
    _libc.ptrace(_PTRACE_TRACEME, 0, 0, 0)
    os.kill(rank, signal.SIGUSR1)


MISDEEDS: Final[dict[str, Callable[[RankSeat, PipeEnd], None]]] = {
    "phase": _board(phase=99),
    "unit": _board(unit=-7),
    "seconds": _board(step_s=-1.0),
    "sequence": _board(sequence=-(2**63)),
    "board cut": _resized(0),
    "board grown": _resized(1 << 20),
    "not a message": _says(b"Traceback (most recent call last):\n"),
    "long line": _says(b"x" * (60 << 20) + b"\n"),
    "endless line": _says(b"x" * 4096, times=None),
    "flood": _says(_EVALUATED % 3 * 200, times=None),
    "negative step": _says(_EVALUATED % -1),
    "endless number": _says(b'{"kind":"rank_epoch_broken","epoch":%d}\n' % 10**300),
    "others' checkpoint": _says(
        b'{"kind":"rank_found_corrupt","checkpoint_id":"%s","file":"f","reason":"r"}\n'
        % OTHERS_CHECKPOINT.encode()
    ),
    "another's vote": _vote_for_another_rank,
    "child writes nonsense": _leaves(_EVALUATED % -1),
    "child writes on": _leaves(_EVALUATED % 3),
    "log folder: pipe": _replaces(_log_folder, os.mkfifo),
    "log folder: link": _replaces(_log_folder, _points_elsewhere),
    "board folder: pipe": _replaces(_board_folder, os.mkfifo),
    "board folder: link": _replaces(_board_folder, _points_elsewhere),
    "storage: pipe": _replaces(_storage, os.mkfifo),
    "storage: link": _replaces(_storage, _points_elsewhere),
    "chain: pipe": _replaces(_chain, os.mkfifo),
    "chain: file": _replaces(_chain, Path.touch),
    "descriptors": _hands_over_what_takes_an_hour_to_close,
    "hangs up": _hangs_up,
    "log kept from": _writes_past_its_agent,
    "stranger": _leaves_a_stranger,
    "log cut": _spoils_its_log,
    "log cut while it is read": _cuts_its_log_while_it_is_read,
    "log replaced": _puts_a_pipe_in_place_of_its_log,
    "name": _calls_itself_what_is_no_text,
    "traced": _is_traced(0),
    "traced by its parent": _makes_its_parent_its_tracer,
    "traced at its end": _is_traced(_PTRACE_O_TRACEEXIT),
}
