"""Models and data as users write them, well and badly, for probes."""

import ctypes
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

VOCAB = 256
_PIDFD_GETFD = 438
_PR_SET_PDEATHSIG = 1
_PTRACE_SEIZE = 0x4206


class Tokens:
    """Data of one length, which talks."""

    digest = "none"

    def __init__(self, length: int) -> None:
        self._length = length

    def batch(self, step: int, indices: Sequence[int]) -> torch.Tensor:
        sys.stdout.write(f'{{"kind": "model_probed", "step": {step}}}\n')
        return torch.zeros(len(indices), self._length + 1, dtype=torch.int64)

    def validation(self) -> list[torch.Tensor]:
        return []

    def baselines(self) -> dict[str, float]:
        return {}


def tokens(length: int = 16) -> Tokens:
    return Tokens(length)


class Small(nn.Module):
    """A model that is no trouble."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(tokens))
        return logits


def hangs(child_to: str) -> nn.Module:
    """Waits forever, and so does a process of another session."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True
    )
    draft = Path(f"{child_to}.draft")
    draft.write_text(str(child.pid))
    draft.replace(child_to)
    while True:
        signal.pause()


def hangs_in(credential: str) -> nn.Module:
    """Waits forever in code from a place whose name has a secret in it."""
    waits = compile("import signal\nsignal.pause()", f"https://host/{credential}/model.py", "exec")
    exec(waits, {})  # noqa: S102 a test's own
    return Small()


def disowns(child_to: str) -> nn.Module:
    """Leaves a process without parent, mark and end, of a session of its own; then hangs."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            code = "import signal; signal.pause()"
            draft = Path(f"{child_to}.draft")
            draft.write_text(str(os.getpid()))
            draft.replace(child_to)
            os.execve(sys.executable, [sys.executable, "-c", code], {})  # noqa: S606 no shell
        os._exit(0)
    while True:
        signal.pause()


def is_traced(child_to: str) -> nn.Module:
    """Ends while a process without mark and end, of a session of its own, traces it."""
    own = os.getpid()
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, 0)
        libc.ptrace(_PTRACE_SEIZE, own, None, None)
        Path(child_to).write_text(str(os.getpid()))
        os.write(writing, b"!")
        code = "import signal; signal.pause()"
        os.execve(sys.executable, [sys.executable, "-c", code], {})  # noqa: S606 no shell
    os.read(reading, 1)
    os._exit(0)


def reports_its_end() -> nn.Module:
    """Tells the agent of its end in words, before the process that waits for it does in a number."""
    waiting = os.pidfd_open(os.getppid())
    for entry in Path(f"/proc/{os.getppid()}/fd").iterdir():
        if str(entry.readlink()).startswith("socket:"):
            end = ctypes.CDLL(None).syscall(_PIDFD_GETFD, waiting, int(entry.name), 0)
            os.write(
                end, b"no number " * 100
            )  # where the kernel refuses the descriptor, this raises
    os._exit(0)


def hoards() -> nn.Module:
    """Makes tensors where it wants them, without end."""
    hoard = []
    while True:
        hoard.append(torch.zeros(1 << 20, device="cpu"))


def talks(megabytes: int) -> nn.Module:
    """Says a lot, and forges its answer at an end that it has inherited."""
    for _ in range(megabytes):
        sys.stderr.write("x" * (1 << 20))
    sys.stderr.write("\nand that was all\n")
    sys.stderr.flush()
    used = max(os.fstat(2).st_blocks * 512, 0)
    found = {
        "kind": "model_probed",
        "probe_id": f"probe_{1:032x}",
        "node_id": "another",
        "took_s": 0,
        "failure": {"code": "raised", "reason": "y" * (1 << 20), "traceback": str(used)},
    }
    answer = answers_end()
    os.write(answer, json.dumps(found).encode())
    os._exit(0)


def answers_end() -> int:
    """The descriptor into which the program below us writes its answer."""
    frames = (each.frame.f_locals for each in inspect.stack(context=0))
    return int(next(known["asked"].answer for known in frames if "asked" in known))


def claims(changes: str, modules: int = 0, letters: int = 0) -> nn.Module:
    """Answers in the place of the probe."""
    answer = answers_end()
    with os.fdopen(answer, "wb") as file:
        file.write(forged(changes, modules, letters))
    os._exit(0)


def forged(changes: str, modules: int = 0, letters: int = 0) -> bytes:
    """The profile of another model, with changes in JSON as Python reads it: with Infinity and NaN."""
    measured = Path(__file__).parents[2] / "controller" / "profiles.json"
    profile = json.loads(measured.read_bytes()) | json.loads(changes)
    profile["modules"] += ["a"] * modules + ["a" * letters]
    answer = {
        "kind": "model_probed",
        "probe_id": f"probe_{1:032x}",
        "node_id": "another",
        "took_s": 0,
        "profile": profile,
        "optimizer": {},
        "sequence_tokens": 1,
    }
    return json.dumps(answer).encode()


def crashes() -> nn.Module:
    sys.stderr.write("I have had enough\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGSEGV)
    return Small()


def breaks_off(credential: str, end: int) -> nn.Module:
    """Ends as a program in C does that has written a block, and not what comes behind it."""
    said = f"the hub asks for {credential}".encode()
    half = said.index("ö".encode()) + 1  # within a letter
    os.write(1, said[:half])
    os.kill(os.getpid(), end)
    return Small()


class Confides(Small):
    """Tells its secret in the error that it raises."""

    def __init__(self, credential: str) -> None:
        super().__init__()
        self._credential = credential

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        del tokens
        raise PermissionError(f"the hub refused {self._credential!r}")
