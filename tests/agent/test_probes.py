"""An agent profiles models and measures its node, in processes that may fail by themselves."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import torch
from pydantic import JsonValue
from torch import nn
from torch.nn import functional

from fsdp_core.plan.model import ADAMW_FUSED, Conditions, NodeFacts
from fsdp_core.plan.profiling import profile_model
from fsdp_core.plan.study import ModelUnderStudy
from services.contract.jobs.specs import JobSpec
from services.contract.messages.commands import ExportCheckpoint, StopGang, VerifyCheckpoint
from services.contract.messages.facts import GangEnded, GangProgressed, Inventory, NodeJoined
from services.contract.messages.probe_ids import UnfitProfileError, probe_id
from services.contract.messages.probe_programs import SelfTestResult
from services.contract.messages.probing import (
    MeasureNode,
    ModelProbed,
    NodeMeasured,
    ProbeFailure,
    ProbeModel,
)
from services.contract.messages.warm_channel import NODE_MARK, ForkProgram
from services.contract.system.mask import Mask
from services.contract.words.ids import checkpoint_id
from services.local.embedded_redis import EmbeddedRedis
from services.worker.agent.host.folders import NodeFolder
from services.worker.agent.probes import programs
from services.worker.agent.probes.prober import NICENESS, _read
from services.worker.agent.probes.programs import ProgramCall, ProgramEnd, ProgramRunner, _end
from services.worker.agent.probes.self_test import SelfTest
from services.worker.agent.storage.job_storage import Storage
from services.worker.agent.supervisor import Supervisor
from services.worker.rank.models.decoder import Decoder
from tests.agent.conftest import (
    FOREVER,
    JOB,
    NODE,
    AgentProcess,
    Controller,
    agents_on,
    is_gone,
    launch,
)
from tests.agent.programs.probed_models import forged
from tests.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.redis]

LENGTH = 16
SECRET = 'pa"ss/wörd & 1234\\5678'  # noqa: S105 a test's
OF_PARTS = "wJalrXUtnFEMI/K7MDENG/bPxRfiCY"
CONDITIONS = (Conditions(recompute=True),)
SMALL: Final[dict[str, JsonValue]] = {"dim": 16, "layers": 2, "heads": 2}
AGAIN = "retry when they have ended"


def question(factory: str, args: dict[str, JsonValue], *, timeout_s: float = 240.0) -> ProbeModel:
    spec = JobSpec.model_validate(
        {
            "model": {"factory": factory, "args": args},
            "data": {"factory": "probed_models:tokens", "args": {"length": LENGTH}},
            "train": {"steps": 1},
        }
    )
    asked = ProbeModel(
        probe_id=f"probe_{0:032x}",
        spec=spec,
        device_type="cpu",
        conditions=CONDITIONS,
        stops=("blocks",) if factory == "decoder" else (),
        timeout_s=timeout_s,
        memory_bytes=256 << 20,
    )
    return asked.model_copy(update={"probe_id": probe_id(asked, {})})


@dataclass
class Node:
    """An agent to ask."""

    agent: AgentProcess
    controller: Controller
    folder: Path

    def ask(self, asked: ProbeModel) -> ModelProbed:
        self.controller.send(asked)
        return self.answer(asked)

    def answer(self, asked: ProbeModel) -> ModelProbed:
        return until(
            lambda: next(
                (f for f in self.controller.all_of(ModelProbed) if f.probe_id == asked.probe_id),
                None,
            ),
            timeout_s=240,
        )

    def fails(self, asked: ProbeModel) -> ProbeFailure:
        answer = self.ask(asked)
        assert answer.profile is None
        assert answer.failure is not None
        return answer.failure

    def measure(self, device_type: str = "cpu") -> NodeMeasured:
        before = len(self.controller.all_of(NodeMeasured))
        self.controller.send(MeasureNode.model_validate({"device_type": device_type}))
        return until(lambda: self.controller.all_of(NodeMeasured)[before:], timeout_s=240)[0]


@pytest.fixture(scope="module")
def node(redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("probes")
    redis_server.flush()
    (folder / "secrets").mkdir()
    (folder / "secrets" / "HUB").write_text(SECRET)
    (folder / "secrets" / "STORE").write_text(OF_PARTS)
    controller = Controller(redis_server.url)
    controller.open_job()
    with agents_on(redis_server.url, folder) as start:
        agent = start(
            MESHLOOM_FACTORY_PREFIXES="probed_models,none",
            MESHLOOM_SECRETS_DIR=str(folder / "secrets"),
            MESHLOOM_CPU_SLOTS="2",
        )
        controller.fact(NodeJoined)
        yield Node(agent, controller, folder)
    controller.client.close()


def test_a_probe_finds_what_a_profile_in_this_process_does(node: Node) -> None:
    answer = node.ask(question("decoder", SMALL))

    def loss(model: nn.Module, sequences: int) -> torch.Tensor:
        tokens = torch.zeros(sequences, LENGTH + 1, dtype=torch.int64)
        logits = model(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def make() -> nn.Module:
        return Decoder(dim=16, layers=2, heads=2)

    expected = profile_model(ModelUnderStudy(make, loss), CONDITIONS, stops=("blocks",))
    assert answer.failure is None
    assert answer.profile is not None
    assert answer.profile.timed is not None
    assert replace(answer.profile, timed=None) == expected
    assert answer.optimizer == ADAMW_FUSED
    assert answer.sequence_tokens == LENGTH


def test_a_model_that_hangs_is_ended_with_all_that_it_started(node: Node) -> None:
    child = node.folder / "child"
    failure = node.fails(question("probed_models:hangs", {"child_to": str(child)}, timeout_s=6))
    assert failure.code == "timed_out"
    assert failure.reason.startswith("no profile within 6 s; it was at ")
    assert failure.reason.endswith("in hangs")
    assert "in hangs" in str(failure.traceback)
    until(lambda: is_gone(int(child.read_text())))


def test_what_a_model_disowns_ends_with_its_probe_though_it_has_no_mark(node: Node) -> None:
    child = node.folder / "stranger"
    failure = node.fails(question("probed_models:disowns", {"child_to": str(child)}, timeout_s=6))
    assert failure.code == "timed_out"
    assert failure.reason.endswith("in disowns")
    until(lambda: is_gone(int(child.read_text())))


def test_what_traces_a_model_that_has_started_it_ends_with_its_probe(node: Node) -> None:
    child = node.folder / "tracer"
    failure = node.fails(
        question("probed_models:is_traced", {"child_to": str(child)}, timeout_s=15)
    )
    assert failure.code == "crashed"
    assert failure.reason.startswith("its process exited with code 0")
    until(lambda: is_gone(int(child.read_text())))


def test_a_model_that_reports_its_end_in_its_program_s_place_gets_an_answer(node: Node) -> None:
    failure = node.fails(question("probed_models:reports_its_end", {}))
    # Where the kernel keeps a process from the descriptors of its parent, the model raises.
    assert "ended by SIGKILL" in failure.reason or failure.code == "raised"


def test_a_model_that_takes_all_memory_is_told_that_it_may_not(node: Node) -> None:
    failure = node.fails(question("probed_models:hoards", {}))
    assert failure.code == "out_of_memory"
    assert "the probe may take 256 MiB" in failure.reason
    assert "in hoards" in str(failure.traceback)


def test_a_model_that_crashes_is_told_with_where_it_did_and_its_last_words(node: Node) -> None:
    failure = node.fails(question("probed_models:crashes", {}))
    assert failure.code == "crashed"
    assert failure.reason.startswith("its process was ended by SIGSEGV; it was at ")
    assert failure.reason.endswith("in crashes")
    assert "I have had enough" in str(failure.traceback)


def test_what_a_model_says_is_cut_and_what_it_forges_is_an_answer_to_its_own_question(
    node: Node,
) -> None:
    failure = node.fails(question("probed_models:talks", {"megabytes": 600}))
    assert failure.code == "raised"
    assert failure.reason.startswith("yyy")
    assert "characters cut" in failure.reason
    assert len(failure.reason) <= 4_096
    assert int(str(failure.traceback)) < 500 << 20, "it was cut while it was written"
    assert node.agent.process.poll() is None


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            {"changes": '{"timed": {"seconds": [[1, Infinity, 1]], "flops": 1}}'},
            "says inf at /profile",
        ),
        ({"changes": "{}", "letters": 9 << 20}, "more than the 8 MiB that are taken"),
    ],
)
def test_a_profile_with_which_nobody_could_plan_is_refused_with_the_reason(
    node: Node, args: dict[str, JsonValue], words: str
) -> None:
    failure = node.fails(question("probed_models:claims", args))
    assert failure.code == "raised"
    assert words in failure.reason


LINE: Final[dict[str, object]] = {"base": 0, "slope": 1}


CURVE: Final = LINE | {"table": [[1, 1], [2, 4], [3, 9]], "curved": True}


def a_trace(lines: list[dict[str, object]], grads: list[int]) -> dict[str, object]:
    segment = {"begins": "start", "module": "", "peak": {"lines": lines}, "change": LINE}
    return {"conditions": {}, "segments": [segment | {"grads": grads}], "tp_bytes": LINE}


def a_unit() -> dict[str, object]:
    peak = {"lines": [LINE]}
    amounts = {"saved": LINE, "forward_peak": peak, "backward_peak": peak, "outputs": LINE}
    return {"module": "a", "kind": "block", "flops": LINE, **amounts}


def a_parameter(also: list[str], shape: list[int] | None = None) -> dict[str, object]:
    trained = {"is_floating": True, "requires_grad": True, "also": also}
    return {"name": "a", "shape": shape or [1], "dtype": "float32", "itemsize": 4, **trained}


@pytest.mark.parametrize(
    ("changes", "modules", "words"),
    [
        ('{"timed": {"seconds": [[1, 1, 1]], "flops": NaN}}', 0, "not a measurement of a model"),
        (f'{{"granularity": 1{"0" * 400}}}', 0, "characters cut"),
        ("{}", 70_000, "modules, more than the 65536"),
        (
            json.dumps({"modules": ["", "a" * 2_049]}),
            0,
            "a name of 2049 characters at /profile/modules/1, more than",
        ),
        (
            json.dumps({"flops": {"base": 0, "slope": 0, "table": [[n, n] for n in range(65)]}}),
            0,
            "65 numbers or names at /profile/flops/table, more than the 64",
        ),
        (
            json.dumps({"traces": [a_trace([LINE] * 257, [0])]}),
            0,
            "257 numbers or names at /profile/traces/0/segments/0/peak/lines",
        ),
        (
            json.dumps({"traces": [a_trace([LINE, CURVE], [0])]}),
            0,
            "curves among the 2 lines at /profile/traces/0/segments/0/peak/lines",
        ),
        (
            json.dumps({"traces": [a_trace([LINE], [0] * 85)]}),
            0,
            "that 85 gradients are made of 21",
        ),
        (json.dumps({"units": [a_unit()] * 1_025}), 0, "1025 units, more than the 1024"),
        (
            json.dumps({"parameters": [a_parameter(["a" + ".a" * 999] * 600)]}),
            0,
            "have 600001 parts, more than the 524288",
        ),
        (
            json.dumps({"parameters": [a_parameter(["a"] * 1_025)]}),
            0,
            "parameters/0/also, more than",
        ),
        (
            json.dumps({"parameters": [a_parameter([], [1] * 65)]}),
            0,
            "parameters/0/shape, more than",
        ),
        (
            json.dumps({"flops": {"base": 0, "slope": 0, "table": [[1, 1]] * 600_000}}),
            0,
            "lists and records, more than the 524288 that are taken",
        ),
    ],
)
def test_whatever_makes_a_profile_unfit_is_told(changes: str, modules: int, words: str) -> None:
    with pytest.raises(UnfitProfileError, match=words):
        _read(forged(changes, modules), Mask({}))


@pytest.mark.parametrize(
    "answer",
    [
        forged("{}", letters=9 << 20),
        forged(json.dumps({"traces": [{"segments": []}] * 300_000})),
    ],
    ids=["many bytes", "many objects"],
)
def test_of_an_answer_that_is_too_large_nothing_is_made(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the loop longer than the node's lease: no other thread runs meanwhile."""
    monkeypatch.setattr(ModelProbed, "model_validate_json", pytest.fail)
    monkeypatch.setattr(Mask, "message", pytest.fail)
    with pytest.raises(UnfitProfileError, match="that are taken"):
        _read(answer, Mask({}))


@pytest.mark.timeout(30)
def test_a_file_that_takes_long_to_cut_or_to_close_holds_up_no_gang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cut once the kernel has written what a model writes to it with one call: two gigabytes, in a minute."""
    begun, freed = threading.Event(), threading.Event()
    cut_in: list[threading.Thread] = []

    def take_long(_: int, __: int) -> None:
        cut_in.append(threading.current_thread())
        begun.set()
        freed.wait()

    monkeypatch.setattr(os, "ftruncate", take_long)
    monkeypatch.setattr(programs, "MOST_KEPT", 0)

    async def say_much(order: ForkProgram, descriptors: tuple[int, int, int, int]) -> int:
        code = (
            "import signal, socket; agent = socket.socket(fileno=0); agent.send(b'?'); "
            "print('y\\n' * 5_000, flush=True); signal.pause()"
        )
        channel, _, words, _ = descriptors
        command = [sys.executable, "-c", code]
        child = subprocess.Popen(  # noqa: ASYNC220 begun at once
            command, stdin=channel, stdout=words, env={NODE_MARK: order.mark}
        )
        children.append(child)
        return child.pid

    children: list[subprocess.Popen[bytes]] = []

    async def ask() -> ProgramEnd:
        runner = ProgramRunner(say_much, f"{NODE}-{tmp_path.name}", tmp_path)
        call = ProgramCall("none", "says much", MeasureNode(device_type="cpu"), 2.0)
        asking = asyncio.create_task(runner.ask(call))
        while not begun.is_set():  # noqa: ASYNC110 a file tells nobody
            await asyncio.sleep(0.01)
        ended = await asking
        freed.set()
        return ended

    ended = asyncio.run(ask())
    children[0].wait()
    assert ended.code is None
    assert ended.words.startswith("y")
    assert cut_in
    assert threading.main_thread() not in cut_in


def test_last_words_do_not_begin_within_a_line(tmp_path: Path) -> None:
    path = tmp_path / "words"
    path.write_text(f"{SECRET * 500}\nlast\n")
    with path.open("rb") as file:
        assert _end(file) == "last"
    path.write_text(f"{SECRET}\nlast\n")
    with path.open("rb") as file:
        assert _end(file) == f"{SECRET}\nlast"


def test_how_a_process_ended_is_told_in_words() -> None:
    assert ProgramEnd(b"", 7, "").how == "its process exited with code 7"
    assert ProgramEnd(b"", -9, "").how == "its process was ended by SIGKILL"
    assert ProgramEnd(b"", -250, "").how == "its process was ended by signal 250"


def test_an_exception_is_told_in_its_own_words_without_the_secrets_in_them(node: Node) -> None:
    failure = node.fails(question("probed_models:Confides", {"credential": {"secret": "HUB"}}))
    assert failure.code == "raised"
    assert failure.reason == "model: PermissionError: the hub refused '[secret HUB]'"
    assert "in forward" in str(failure.traceback)
    told = "\n".join(fact.model_dump_json() for fact in node.controller.facts())
    kept = b"".join(p.read_bytes() for p in node.agent.folder.path.rglob("*") if p.is_file())
    for form in (SECRET, json.dumps(SECRET)[1:-1], json.dumps(SECRET, ensure_ascii=False)[1:-1]):
        assert form not in told
        assert form.encode() not in kept
        assert form not in node.agent.log.read_text()


@pytest.mark.parametrize("end", [signal.SIGSEGV, signal.SIGKILL])
def test_no_half_of_a_secret_is_told_of_a_model_that_was_ended(node: Node, end: int) -> None:
    args: dict[str, JsonValue] = {"credential": {"secret": "HUB"}, "end": int(end)}
    failure = node.fails(question("probed_models:breaks_off", args))
    assert failure.code == "crashed"
    assert "the hub asks for [secret HUB]" in str(failure.traceback)
    assert SECRET[:4] not in failure.model_dump_json()
    assert json.dumps(SECRET[:4])[1:-1] not in failure.model_dump_json()


def test_no_half_of_a_secret_is_told_of_the_place_where_a_model_hangs(node: Node) -> None:
    asked = question("probed_models:hangs_in", {"credential": {"secret": "STORE"}}, timeout_s=6)
    failure = node.fails(asked)
    assert failure.reason.endswith("it was at host/[secret STORE]/model.py:2 in <module>")
    assert not [part for part in OF_PARTS.split("/") if part in failure.model_dump_json()]


def test_what_the_node_does_not_allow_is_refused_without_a_process(node: Node) -> None:
    failure = node.fails(question("os:system", {"command": "true"}))
    assert failure.code == "refused"
    assert "os:system is not among MESHLOOM_FACTORY_PREFIXES" in failure.reason
    failure = node.fails(question("probed_models:Net", {"dim": {"secret": "NONE"}}))
    assert failure.code == "refused"
    assert "secret NONE" in failure.reason


def test_a_node_is_not_measured_where_ranks_run(node: Node) -> None:
    node.controller.send(MeasureNode(device_type="cpu"), launch(1, 1, FOREVER, pause_s=0.01))
    first = until(lambda: node.controller.all_of(NodeMeasured), timeout_s=240)[0]
    assert first.facts is None
    assert AGAIN in str(first.failure)
    node.controller.fact(GangProgressed)
    assert AGAIN in str(node.measure().failure)
    node.controller.send(StopGang(job_id=launch().job_id, fence=1, mode="kill"))
    node.controller.fact(GangEnded)


@pytest.mark.system
def test_a_node_is_measured_once_and_its_figures_are_kept(node: Node) -> None:
    first = node.measure()
    assert first.failure is None
    facts = first.facts
    assert facts is not None
    assert set(facts.matmul_flops) == {"fp32", "bf16"}
    rates = (facts.memory_bandwidth, facts.link_bandwidth, facts.network_bandwidth)
    assert min(*facts.matmul_flops.values(), *rates, facts.collective_latency) > 0
    assert 0 <= facts.overlap <= 1
    assert set(facts.exchanges) == {"all_gather", "reduce_scatter", "all_reduce"}
    assert set(facts.shared_exchanges) == {"copy", "storage"}
    for kinds in facts.shared_exchanges.values():
        assert set(kinds) == {"all_gather", "reduce_scatter"}
    assert min(facts.dispatch_s, facts.update_s) > 0
    assert facts.ranks == 2
    assert "not measured" in str(first.detail["network_bandwidth"])
    again = node.measure()
    assert again == first


def test_figures_of_other_hardware_or_versions_are_not_taken_for_this_node_s(
    tmp_path: Path,
) -> None:
    def self_test(**versions: str) -> SelfTest:
        inventory = Inventory(
            hostname="h", cpu_slots=2, cpu_count=2, memory_bytes=1, versions=versions
        )
        folder = NodeFolder(tmp_path, NODE)
        folder.path.mkdir(parents=True, exist_ok=True)
        return SelfTest(
            folder,
            NODE,
            "a",
            inventory,
            ProgramRunner(forks_nothing, "", tmp_path),
        )

    found = SelfTestResult(facts=NodeFacts({"fp32": 1.0}, 1.0, 1.0, 1.0, 1.0, 2))
    self_test(torch="1")._keep("cpu", found)
    assert self_test(torch="1")._known("cpu") == found
    assert self_test(torch="2")._known("cpu") is None
    assert self_test(torch="1")._known("cuda") is None


async def forks_nothing(order: ForkProgram, descriptors: tuple[int, ...]) -> int:
    raise AssertionError(f"{order.program} was forked with {descriptors}")


def test_a_node_without_such_devices_says_so(node: Node) -> None:
    assert node.measure("cuda").failure == "this node runs no ranks on cuda"


def test_a_probe_stands_back_for_ranks_and_does_not_outlive_an_agent_that_is_killed(
    node: Node,
) -> None:
    child = node.folder / "another child"
    asked = question("probed_models:hangs", {"child_to": str(child)})
    node.controller.send(asked)
    until(child.exists, timeout_s=240)
    processes = [psutil.Process(pid) for pid in node.agent.marked()]
    mine = [each for each in processes if each.environ()[NODE_MARK].endswith(asked.probe_id)]
    probes = [each for each in mine if each.pid != int(child.read_text())]
    assert len(probes) == 2, "the user's code runs in a child"
    assert probes[0].parent() != psutil.Process(node.agent.process.pid), "it was forked"
    for probe in probes:
        assert probe.nice() == min(19, psutil.Process(node.agent.process.pid).nice() + NICENESS)
        assert Path(f"/proc/{probe.pid}/oom_score_adj").read_text().strip() == "1000"
    node.agent.kill()  # nobody can be asked after this test, which is the last
    until(lambda: is_gone(int(child.read_text())) and not node.agent.marked())


def test_a_question_for_which_nobody_waits_any_more_is_passed_over(tmp_path: Path) -> None:
    began: list[str] = []
    ends = asyncio.Event()

    class SlowNode:
        """Takes its time for the first question."""

        async def to(self, command: ProbeModel, _ranks_are_here: object) -> tuple[()]:
            began.append(command.probe_id)
            await ends.wait()
            return ()

    async def run() -> None:
        nothing: Any = None
        node: Any = SlowNode()
        folder = NodeFolder(tmp_path / "home", NODE, tmp_path)
        storage = Storage(tmp_path, NODE)
        supervisor = Supervisor(NODE, folder, storage, node, nothing, nothing)
        asked = [question("decoder", SMALL, timeout_s=seconds) for seconds in (60, 1e-9, 60)]
        asked = [
            each.model_copy(update={"probe_id": f"probe_{number:032x}"})
            for number, each in enumerate(asked)
        ]
        async with asyncio.TaskGroup() as carrying:
            for each in asked:
                carrying.create_task(supervisor.handle(each))
            await asyncio.sleep(0)
            ends.set()
        assert began == [asked[0].probe_id, asked[2].probe_id]

    asyncio.run(run())


def reading(kind: type[VerifyCheckpoint | ExportCheckpoint]) -> VerifyCheckpoint | ExportCheckpoint:
    return kind(job_id=JOB, fence=1, checkpoint_id=checkpoint_id(JOB, 1, 1))


@pytest.mark.parametrize(
    "asked",
    [question("decoder", SMALL), reading(VerifyCheckpoint), reading(ExportCheckpoint)],
    ids=lambda command: command.kind,
)
def test_who_asks_for_much_makes_others_wait_for_one(
    tmp_path: Path, asked: ProbeModel | VerifyCheckpoint | ExportCheckpoint
) -> None:
    began: list[str] = []
    ends = asyncio.Event()

    class SlowNode:
        """Takes its time for the first one."""

        async def to(self, command: ProbeModel, _ranks_are_here: object) -> tuple[()]:
            began.append(command.owner)
            await ends.wait()
            return ()

    async def run() -> None:
        nothing: Any = None
        node: Any = SlowNode()
        folder = NodeFolder(tmp_path / "home", NODE, tmp_path)
        supervisor = Supervisor(NODE, folder, Storage(tmp_path, NODE), node, nothing, nothing)
        async with asyncio.TaskGroup() as carrying:
            for who in ("sam", "sam", "sam", "ann", "ann", "joe"):
                each = asked.model_copy(update={"owner": who})
                carrying.create_task(supervisor.handle(each))
            await asyncio.sleep(0)
            ends.set()
        assert began[:3] == ["sam", "ann", "joe"]
        assert sorted(began[3:]) == ["ann", "sam", "sam"]

    asyncio.run(run())
