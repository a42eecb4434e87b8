"""`meshloom.Client` and `meshloom.AsyncClient` on a live stack, as programs and notebooks use them."""

import asyncio
import queue

import pytest

import meshloom
from meshloom.client import RefusedError, WaitTimeoutError
from services.contract.words.states import CheckpointState, JobState
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
