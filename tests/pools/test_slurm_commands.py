"""Commands of Slurm that misbehave: programs that stand in their place."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from services.controller.adapters.pools import slurm
from services.controller.adapters.pools.pools_file import SlurmPoolConfig
from services.controller.adapters.pools.slurm import SlurmPool
from services.controller.domain.scheduling.reservations import Sighting
from services.controller.ports.pools import AgentProcess, PoolError, PoolRefusedError
from services.worker.agent.host.processes import is_dying
from tests.waiting import until


def pool_with(folder: Path, **programs: str) -> SlurmPool:
    """A pool whose commands are these lines of shell."""
    for name, lines in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(0o755)
    config = SlurmPoolConfig(kind="slurm", name="hpc", cpu_slots=1, max_nodes=99, bin=folder)
    return SlurmPool(config, "ours", variables={"PATH": "/usr/bin:/bin", "SECRET": "word"})


def test_a_missing_command_is_named(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=r"/squeue: No such file or directory"):
        asyncio.run(pool_with(tmp_path).sightings())


def test_output_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=r"squeue printed more than 16777216 bytes"):
        asyncio.run(pool_with(tmp_path, squeue="exec yes").sightings())


def test_a_command_that_does_not_end_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "_ANSWER_S", 3.0)
    lines = f"sleep 600 &\necho $! > {tmp_path}/child\nwait"
    with pytest.raises(PoolError, match=r"squeue did not end within 3 s"):
        asyncio.run(pool_with(tmp_path, squeue=lines).sightings())
    child = int((tmp_path / "child").read_text())
    until(lambda: is_dying(child))


def test_only_batch_jobs_of_this_owner_and_pool_are_seen(tmp_path: Path) -> None:
    lines = [
        "1|NODE_FAIL|None|ours-a|meshloom owner=ours pool=hpc nodes=1-3,7",
        "2|PENDING|Priority|ours-b|meshloom owner=ours pool=hpc nodes=9",
        "3|PENDING|Dependency|ours-b|meshloom owner=ours pool=hpc nodes=9",
        "4|RUNNING|None|ours-c|meshloom owner=ours pool=other nodes=1",
        "5|RUNNING|None|theirs-d|meshloom owner=theirs pool=hpc nodes=1",
        "6|RUNNING|None|a|b|(null)",
        "7|RUNNING|None|c|",
        # Batch jobs of the same account whose comments we did not write.
        f"8|RUNNING|None|ours-d|meshloom owner=ours pool=hpc nodes={'1' * 4_000}x",
        "9|RUNNING|None|ours-e|meshloom owner=ours pool=hpc nodes=1-2-3",
        "10|RUNNING|None|ours-f|meshloom owner=ours pool=hpc nodes=1,",
        "meshloom owner=ours pool=hpc nodes=1",
        "x|RUNNING|None|ours-g|meshloom owner=ours pool=hpc nodes=1",
        "11|RUNNING|None|another|meshloom owner=ours pool=hpc nodes=1",
    ]
    (tmp_path / "said").write_text("\n".join(lines) + "\n")
    pool = pool_with(tmp_path, squeue=f"cat {tmp_path}/said")
    assert sorted(asyncio.run(pool.sightings()), key=lambda each: each.id) == [
        Sighting(
            "a",
            ("hpc-1", "hpc-2", "hpc-3", "hpc-7"),
            is_held=False,
            reason="Slurm's job 1 is NODE_FAIL",
        ),
        Sighting("b", ("hpc-9",), is_held=True, reason="Priority"),
    ]


def test_of_a_batch_job_no_more_nodes_are_read_than_a_pool_may_have(tmp_path: Path) -> None:
    every = ",".join(["0-99999"] * 5_000)
    line = f"1|RUNNING|None|ours-a|meshloom owner=ours pool=hpc nodes={every}"
    (tmp_path / "said").write_text(line + "\n")
    (seen,) = asyncio.run(pool_with(tmp_path, squeue=f"cat {tmp_path}/said").sightings())
    assert len(seen.node_ids) == 10_000


def test_the_script_goes_by_standard_input_and_the_environment_of_the_controller_nowhere(
    tmp_path: Path,
) -> None:
    sbatch = (
        f'env > {tmp_path}/env; printf "%s\\n" "$@" > {tmp_path}/words; cat > {tmp_path}/script'
    )
    pool = pool_with(tmp_path, squeue="true", sbatch=sbatch)
    agents = {
        f"hpc-{number}": AgentProcess(("agent",), {"PASSWORD": f"of {number}"})
        for number in (1, 2, 3, 7)
    }
    asyncio.run(pool.provision("id", agents))
    words = (tmp_path / "words").read_text().splitlines()
    assert "--comment=meshloom owner=ours pool=hpc nodes=1-3,7" in words
    assert "--nodes=4" in words
    assert not any("of 1" in word for word in words)
    assert "of 7" in (tmp_path / "script").read_text()
    assert "SECRET" not in (tmp_path / "env").read_text()


@pytest.mark.parametrize(
    ("complaint", "refused"),
    [
        ("sbatch: error: Unable to contact slurm controller (connect failure)", False),
        ("sbatch: error: Batch job submission failed: Socket timed out", False),
        ("sbatch: error: Requested node configuration is not available", True),
    ],
)
def test_a_refusal_is_told_from_silence(tmp_path: Path, complaint: str, *, refused: bool) -> None:
    pool = pool_with(
        tmp_path, squeue="true", sbatch=f"cat >/dev/null\necho '{complaint}' >&2\nexit 1"
    )
    with pytest.raises(PoolError) as caught:
        asyncio.run(pool.provision("id", {"hpc-1": AgentProcess(("agent",), {})}))
    assert str(caught.value) == complaint
    assert isinstance(caught.value, PoolRefusedError) == refused


def test_what_is_no_name_of_a_variable_is_refused(tmp_path: Path) -> None:
    pool = pool_with(tmp_path, squeue="true")
    with pytest.raises(PoolRefusedError, match=r"/agent/environment/a;b"):
        asyncio.run(pool.provision("id", {"hpc-1": AgentProcess(("agent",), {"a;b": "c"})}))


@pytest.mark.parametrize(
    ("late_s", "said"),
    [(15.0, "4 5\n--batch --signal=USR1 3\n"), (-60.0, "3 4 5\n")],
)
def test_what_runs_is_asked_to_end_and_cancelled_when_it_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late_s: float, said: str
) -> None:
    monkeypatch.setattr(slurm, "_LATE_S", late_s)
    comment = "meshloom owner=ours pool=hpc nodes=1"
    states = enumerate(("COMPLETED", "COMPLETING", "RUNNING", "PENDING", "SUSPENDED"), start=1)
    lines = "\n".join(f"{number}|{state}|None|ours-id|{comment}" for number, state in states)
    (tmp_path / "said").write_text(f"{lines}\n")
    pool = pool_with(
        tmp_path, squeue=f"cat {tmp_path}/said", scancel=f'echo "$@" >> {tmp_path}/words'
    )
    asyncio.run(pool.release("id"))
    assert (tmp_path / "words").read_text() == said


@pytest.mark.parametrize(
    ("complaints", "code", "is_refused"),
    [
        (("Kill job error on job id 3: Invalid job id specified",), 1, False),
        (("Kill job error on job id 3: Job/step already completing or completed",) * 2, 1, False),
        (("Kill job error on job id 3: Invalid job id specified", "Access denied"), 1, True),
        ((), 1, True),
        ((), 2017 % 256, False),
        ((), 2021 % 256, False),
        (("Access denied",), 2021 % 256, True),
    ],
)
def test_a_batch_job_that_has_ended_since_the_look_is_nothing_to_complain_of(
    tmp_path: Path, complaints: tuple[str, ...], code: int, *, is_refused: bool
) -> None:
    line = "3|RUNNING|None|ours-id|meshloom owner=ours pool=hpc nodes=1"
    told = [f'echo "scancel: error: {complaint}" >&2' for complaint in complaints]
    pool = pool_with(tmp_path, squeue=f'echo "{line}"', scancel="\n".join((*told, f"exit {code}")))
    expected = pytest.raises(PoolError) if is_refused else contextlib.nullcontext()
    with expected:
        asyncio.run(pool.release("id"))
