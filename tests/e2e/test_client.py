"""`meshloom.Client` and `meshloom.AsyncClient` on a live stack, as programs and notebooks use them."""

import asyncio
import queue
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load

import meshloom
from meshloom.client import DownloadError, RefusedError, WaitTimeoutError
from services.contract.words.states import CheckpointState, JobState
from services.local.settings import child_environment
from tests.e2e.conftest import LONG, Stack, tiny_spec

pytestmark = [pytest.mark.ranks, pytest.mark.redis]


def test_a_program_submits_a_job_waits_and_reads_all_of_it(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    with meshloom.Client(stack.url) as client:
        job = client.jobs.submit(tiny_spec(name="by-a-program", labels={"by": "a-program"}))
        kinds = [event.kind for event in job.events(follow=True)]
        assert kinds[0] == "job.queued"
        assert "checkpoint.committed" in kinds
        assert job.watch().state is JobState.SUCCEEDED
        assert "by-a-program SUCCEEDED  step 40/40" in capsys.readouterr().out
        assert [event.kind for event in job.events()] == kinds
        assert list(job.logs()) == list(stack.client.logs(job.id))

        metrics = job.metrics()
        assert [row["step"] for row in metrics] == list(range(1, 41))
        frame = metrics.to_dataframe()
        assert frame.loss.to_dict() == stack.losses(job.id)
        assert {"loss", "step_time_s", "fence"} <= set(frame.columns)

        newest = job.checkpoints()[0]
        assert (newest.step, newest.state) == (40, CheckpointState.COMMITTED)
        assert client.checkpoints.get(newest.id).pin().view.pinned
        assert not newest.unpin().view.pinned

        changes = {"name": "a-clone", "train": {"steps": 60}}
        clone = job.clone(changes, from_checkpoint="latest", idempotency_key=job.id)
        again = job.clone(changes, from_checkpoint="latest", idempotency_key=job.id)
        assert again.id == clone.id
        assert clone.view.cloned_from is not None
        assert (clone.name, clone.view.cloned_from.step) == ("a-clone", 40)
        clone.cancel(checkpoint="none").wait()
        assert [found.id for found in client.jobs.list(label=["by=a-program"])] == [
            clone.id,
            job.id,
        ]
        assert clone.delete()
        with pytest.raises(RefusedError) as refused:
            clone.refresh()
        assert refused.value.problem.code == "not_found"
        assert [node.state for node in client.nodes.list()] == ["READY"]
        assert client.queue.capacity().cpu_slots == 4


def test_many_things_happen_at_once_in_an_async_program(stack: Stack) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(120), meshloom.AsyncClient(stack.url) as client:
            job = await client.jobs.submit(tiny_spec(**LONG))
            seen: asyncio.Queue[str] = asyncio.Queue()

            async def follow() -> None:
                async for event in job.events(follow=True):
                    seen.put_nowait(event.kind)

            following = asyncio.create_task(follow())
            while await seen.get() != "job.running":
                pass
            with pytest.raises(WaitTimeoutError, match="it goes on"):
                await job.wait(timeout_s=0, poll_s=0.01)
            await job.patch(priority=5)
            assert job.view.priority == 5
            assert (await (await job.pause()).wait()).state is JobState.PAUSED
            await job.resume()
            await (await job.cancel(checkpoint="none")).wait()
            await following
            assert job.state is JobState.CANCELLED
            kinds = [seen.get_nowait() for _ in range(seen.qsize())]
            assert kinds.index("job.paused") < kinds.index("job.cancelled")

    asyncio.run(scenario())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # dcp.load in one process
def test_a_checkpoint_is_downloaded_resumed_and_checked(stack: Stack, tmp_path: Path) -> None:
    with meshloom.Client(stack.url) as client:
        job = client.jobs.submit(tiny_spec(name="exported")).wait()
        checkpoint = job.checkpoints()[0]
        (file,) = checkpoint.download(tmp_path / "model")
        assert checkpoint.view.export is not None
        stored = stack.home / "checkpoints" / checkpoint.view.export.folder / file.name
        content = stored.read_bytes()
        assert file.read_bytes() == content

        # What an earlier download left is kept: with wrong bytes in it the file is not what was promised.
        part = file.with_name(f".{file.name}.part")
        file.rename(part)
        part.write_bytes(b"\0" * (len(content) // 2))
        with pytest.raises(DownloadError, match="SHA-256"):
            checkpoint.download(file.parent)
        part.write_bytes(content[: len(content) // 2])
        assert checkpoint.download(file.parent) == [file]
        assert file.read_bytes() == content
        assert list(file.parent.iterdir()) == [file]

        by_command = subprocess.run(
            [
                sys.executable,
                "-m",
                "services.cli",
                "export",
                checkpoint.id,
                "--output",
                "by-command",
            ],
            env=child_environment(MESHLOOM_URL=stack.url),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert by_command.stdout == "by-command/model.safetensors\n"
        assert (tmp_path / by_command.stdout.strip()).read_bytes() == content

        with pytest.raises(DownloadError, match=r"config\.json"):
            checkpoint.download(tmp_path / "hf", format="hf")
        (folder,) = checkpoint.download(tmp_path / "dcp", format="dcp")
        tensors = load_file(file)
        loaded = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        load(loaded, checkpoint_id=folder, no_dist=True)
        assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)

        url = f"{stack.url}/v1/checkpoints/{checkpoint.id}/files/{file.name}"
        whole = httpx.get(url, headers={"Range": "bytes=8-15", "If-Range": '"of another file"'})
        assert (whole.status_code, len(whole.content)) == (200, len(content))
        some = httpx.get(url, headers={"Range": "bytes=8-15", "If-Range": whole.headers["etag"]})
        assert (some.status_code, some.content) == (206, content[8:16])
        assert some.headers["content-range"] == f"bytes 8-15/{len(content)}"
        assert httpx.get(url, headers={"If-None-Match": some.headers["etag"]}).status_code == 304
        late = httpx.get(url, headers={"Range": f"bytes={len(content)}-"})
        assert (late.status_code, late.json()["code"]) == (416, "range_not_satisfiable")


def test_a_refusal_names_every_fault_of_the_spec(stack: Stack) -> None:
    with meshloom.Client(stack.url) as client:
        faulty = tiny_spec(name="", train={"steps": -1, "global_batch": 4})
        with pytest.raises(RefusedError) as refused:
            client.jobs.check(faulty)
    assert {fault.pointer for fault in refused.value.problem.errors} == {"/name", "/train/steps"}


def test_a_notebook_shows_one_line_that_changes(stack: Stack) -> None:
    manager_module = pytest.importorskip("jupyter_client.manager")
    manager, kernel = manager_module.start_new_kernel()
    code = (
        "import meshloom\n"
        f"client = meshloom.Client({stack.url!r})\n"
        f"job = client.jobs.submit({tiny_spec(name='in-a-notebook')!r})\n"
        "job.watch().state.value\n"
    )
    shown: list[tuple[str, str]] = []
    try:
        reply = kernel.execute_interactive(
            code, timeout=120, output_hook=lambda message: _keep(message, shown)
        )
    except queue.Empty:
        pytest.fail(f"the kernel did not answer; it showed {shown}")
    finally:
        kernel.stop_channels()
        manager.shutdown_kernel(now=True)
    assert reply["content"]["status"] == "ok", (reply, shown)
    kinds = [kind for kind, _ in shown]
    assert kinds[0] == "display_data"
    assert "update_display_data" in kinds
    assert kinds.count("display_data") == 1
    last = [text for kind, text in shown if kind == "update_display_data"][-1]
    assert "in-a-notebook SUCCEEDED" in last
    assert '<progress value="40" max="40">' in last


def _keep(message: dict[str, object], shown: list[tuple[str, str]]) -> None:
    content = message["content"]
    assert isinstance(content, dict)
    kind = str(message["msg_type"])
    if kind.endswith("display_data"):
        shown.append((kind, str(content["data"]["text/html"])))
    elif kind in {"stream", "error"}:
        shown.append((kind, str(content)))
