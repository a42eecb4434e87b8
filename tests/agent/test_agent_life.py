"""How an agent lives, dies and comes back: kills, restarts, a Redis that goes away."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from services.contract.messages.board import BoardReader
from services.contract.messages.commands import CommitCheckpoint, StopGang
from services.contract.messages.facts import (
    CheckpointLost,
    CheckpointVoted,
    GangEnded,
    GangProgressed,
    JobFound,
    LaunchRefused,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
)
from services.contract.redis import redis_keys
from services.contract.storage.manifests import Manifest
from services.contract.words.control_characters import harmless
from services.contract.words.ids import checkpoint_id
from services.local.embedded_redis import EmbeddedRedis
from services.local.settings import child_environment
from tests.agent.conftest import (
    FOREVER,
    JOB,
    NODE,
    PROGRAMS,
    AgentProcess,
    Controller,
    StartAgent,
    ended,
    is_gone,
    launch,
    launched,
    running,
    step_of,
)
from tests.chaos.proxy import ChaosProxy, Mode
from tests.waiting import until

pytestmark = pytest.mark.system


def lease_of(controller: Controller) -> object:
    return controller.client.get(redis_keys.node_lease(NODE))


def test_the_next_agent_sweeps_and_tells_what_the_killed_one_could_not(
    agent: AgentProcess, controller: Controller, start_agent: StartAgent
) -> None:
    running(controller, child=True)
    until(lambda: len(controller.steps()) > 3)
    sentinel = agent.sentinel()
    agent.process.send_signal(signal.SIGSTOP)  # it would start another
    sentinel.kill()
    until(lambda: is_gone(sentinel.pid))
    agent.kill()
    orphans = agent.marked()
    assert orphans, "without a sentinel, children of ranks survive the kernel's kill of the ranks"
    start_agent()
    end = ended(controller)
    until(lambda: len(controller.all_of(NodeJoined)) == 2)
    until(lambda: all(is_gone(pid) for pid in orphans))
    assert [e.signal for e in end.exits] == [signal.SIGKILL] * 2
    last = next(e.step for e in end.exits if e.rank == 0)
    steps = [record.step for record in controller.steps()]
    # The kill can come between a step's entry in the ring and its snapshot.
    assert 3 < last <= len(steps) <= last + 1
    assert steps == list(range(1, len(steps) + 1))
    first, second = controller.all_of(NodeJoined)
    assert first.incarnation != second.incarnation
    assert second.gangs == ()
    controller.send(launch())
    until(lambda: len(controller.all_of(GangEnded)) == 2)
    assert controller.all_of(GangEnded) == [end, end], "an attempt is launched once, ever"


@pytest.mark.parametrize("what", ["no text", "another type"])
def test_what_others_wrote_in_place_of_its_steps_keeps_no_agent_from_coming_back(
    agent: AgentProcess, controller: Controller, start_agent: StartAgent, what: str
) -> None:
    """Where telemetry has no secret names every agent may write that of every job."""
    running(controller)
    until(lambda: len(controller.steps()) > 3)
    agent.kill()
    key = redis_keys.job_steps(JOB)
    if what == "no text":
        controller.client.xadd(key, {redis_keys.MESSAGE_FIELD: b"\xff\xfe"})
    else:
        controller.client.delete(key)
        controller.client.hset(key, "of another", "type")
    again = start_agent()
    until(lambda: len(controller.all_of(NodeJoined)) == 2 or again.process.poll() is not None)
    assert again.process.poll() is None
    ended(controller)
    controller.send(launch(fence=2))
    ended(controller, fence=2)


def test_a_stopped_agent_tells_all_and_leaves_nothing_but_its_lease_if_gangs_ended_with_it(
    agent: AgentProcess, start_agent: StartAgent, controller: Controller
) -> None:
    pids = running(controller, child=True).pids
    assert agent.stop() == 0
    assert [fact.kind for fact in controller.facts()][-2:] == ["node_left", "gang_ended"]
    assert controller.all_of(NodeLeft)[0].node_id == NODE
    assert {e.error for e in ended(controller).exits} == {"killed: the agent was stopped"}
    # Released, a controller that has not read the gang's end yet could take it for a loss of the node.
    assert lease_of(controller) == controller.all_of(NodeJoined)[0].incarnation
    assert all(is_gone(pid) for pid in pids.values())
    assert not agent.marked()
    boards = Path("/dev/shm")  # noqa: S108 where boards lie
    assert not list(boards.glob(f"meshloom-{agent.folder.mark}-*"))
    again = start_agent()
    until(lambda: len(controller.all_of(NodeJoined)) == 2)
    assert again.stop() == 0
    assert lease_of(controller) is None


def test_an_agent_with_a_grace_has_its_gang_move_before_it_leaves(
    controller: Controller, start_agent: StartAgent
) -> None:
    controller.open_job()
    agent = start_agent(MESHLOOM_STOP_GRACE_S="600")
    controller.fact(NodeJoined)
    controller.send(launch(1, 1, FOREVER, pause_s=0.01))
    controller.fact(GangProgressed)
    agent.process.send_signal(signal.SIGTERM)
    assert controller.fact(NodeLeaving).grace_s == 600
    assert not controller.all_of(GangEnded)
    controller.send(StopGang(job_id=JOB, fence=1, mode="drain"))
    assert [e.error for e in ended(controller).exits] == [None]
    vote = controller.fact(CheckpointVoted)
    manifest = Manifest(
        job_id=JOB,
        checkpoint_id=vote.checkpoint_id,
        fence=1,
        step=vote.step,
        world_size=1,
        shards=(vote.shard,),
    )
    controller.send(CommitCheckpoint(job_id=JOB, fence=1, manifest=manifest))
    assert agent.process.wait(60) == 0
    kinds = [fact.kind for fact in controller.facts()]
    assert kinds[-3:] == ["gang_ended", "checkpoint_linked", "node_left"]


def test_a_grace_that_is_over_ends_the_gang(
    controller: Controller, start_agent: StartAgent
) -> None:
    controller.open_job()
    agent = start_agent(MESHLOOM_STOP_GRACE_S="0.1")
    controller.fact(NodeJoined)
    running(controller)
    agent.process.send_signal(signal.SIGTERM)
    assert agent.process.wait(60) == 0
    assert {e.error for e in ended(controller).exits} == {"killed: the agent was stopped"}


def test_a_gang_lives_on_while_redis_is_away_and_nothing_is_lost(
    start_agent: StartAgent, tmp_path: Path
) -> None:
    with EmbeddedRedis.start(tmp_path / "redis") as server:
        controller = Controller(server.url)
        controller.open_job()
        agent = start_agent(url=server.url)
        pids = running(controller, lines=50).pids
        until(lambda: len(controller.steps()) > 5 and controller.logs())
        server.process.kill()
        server.process.wait()
    board = agent.folder.attempt(JOB, 1).board(0)
    reader = until(lambda: BoardReader.open(board) if board.exists() else None)
    seen = step_of(reader)
    until(lambda: step_of(reader) > seen + 100)
    reader.close()
    with EmbeddedRedis.start(tmp_path / "redis") as server:
        assert not any(is_gone(pid) for pid in pids.values())
        controller.client.connection_pool.disconnect()
        controller.send(StopGang(job_id=JOB, fence=1, mode="drain"))
        end = ended(controller)
        last = next(e.step for e in end.exits if e.rank == 0)
        assert [record.step for record in controller.steps()] == list(range(1, last + 1))
        assert len([line for line in controller.logs() if line.rank == 0]) == 50
        # Sent again if Redis was killed after it had kept it and before it said so, or if a rank
        # said more of itself after its first step.
        assert len({fact.step for fact in controller.all_of(GangProgressed)}) == 1
        controller.client.close()
        assert agent.stop() == 0


def test_a_gang_trains_on_while_redis_has_no_memory_left_and_nothing_is_lost(
    start_agent: StartAgent, tmp_path: Path
) -> None:
    with EmbeddedRedis.start(tmp_path / "redis") as server:
        controller = Controller(server.url)
        controller.open_job()
        agent = start_agent(url=server.url)
        running(controller)
        controller.client.config_set("maxmemory", "1")
        until(lambda: "redis_unreachable" in agent.log.read_text())
        reader = BoardReader.open(agent.folder.attempt(JOB, 1).board(0))
        seen = step_of(reader)
        until(lambda: step_of(reader) > seen + 100)
        reader.close()
        controller.client.config_set("maxmemory", "0")
        controller.send(StopGang(job_id=JOB, fence=1, mode="drain"))
        end = ended(controller)
        last = next(e.step for e in end.exits if e.rank == 0)
        assert [record.step for record in controller.steps()] == list(range(1, last + 1))
        controller.client.close()
        assert agent.stop() == 0


def test_a_gang_with_a_lower_fence_is_killed_and_tells_no_progress(
    agent: AgentProcess, controller: Controller
) -> None:
    running(controller)
    until(controller.steps)
    controller.open_job(fence=2)
    end = ended(controller)
    assert {e.signal for e in end.exits} == {signal.SIGKILL}
    assert end.last_step >= controller.steps()[-1].step
    assert agent.process.poll() is None


@pytest.mark.usefixtures("agent")
def test_a_gang_whose_job_is_deleted_is_killed_and_one_whose_job_is_lost_trains_on(
    controller: Controller,
) -> None:
    pids = running(controller).pids.values()
    controller.client.delete(redis_keys.job(JOB))
    assert controller.fact(JobFound, lambda fact: fact.is_running).fence == 1
    assert not any(is_gone(pid) for pid in pids)
    controller.client.sadd(redis_keys.DELETED_JOBS, JOB)
    ended(controller)


def test_a_lapsed_lease_is_taken_again_and_the_agent_joins_again_with_its_gangs(
    agent: AgentProcess, controller: Controller
) -> None:
    running(controller)
    controller.client.delete(redis_keys.node_lease(NODE))
    again = controller.fact(NodeJoined, lambda fact: bool(fact.gangs))
    assert again.incarnation == lease_of(controller) == controller.all_of(NodeJoined)[0].incarnation
    assert again.gangs[0].ranks == (0, 1)
    assert agent.process.poll() is None


def test_an_agent_joins_again_once_redis_is_back_though_its_lease_never_lapsed(
    controller: Controller, start_agent: StartAgent
) -> None:
    """A replica may have been made the server: it lacks the last attempts, and the ends of others."""
    parts = urlsplit(controller.url)
    controller.open_job()
    with ChaosProxy.to(Path(parts.path)) as link:
        agent = start_agent(url=f"redis://:{parts.password}@127.0.0.1:{link.port}")
        running(controller)
        with link.misbehaving(Mode.CUT):
            until(lambda: "redis_unreachable" in agent.log.read_text())
            life = controller.fact(NodeJoined).incarnation
            controller.client.set(redis_keys.node_lease(NODE), life)
        again = controller.fact(NodeJoined, lambda fact: fact.number == 2)
        assert again.gangs[0].ranks == (0, 1)
        assert "lease_had_lapsed" not in agent.log.read_text()
        agent.kill()


def test_an_agent_whose_lease_another_took_kills_its_gangs_and_says_why(
    agent: AgentProcess, controller: Controller
) -> None:
    pids = running(controller).pids
    other = "somebody-\x1b[2J\nelse"
    controller.client.set(redis_keys.node_lease(NODE), other)
    assert agent.process.wait(60) == 3
    said = agent.log.read_text()
    assert r"in use by another agent (incarnation somebody-\x1b[2J\nelse)" in said
    until(lambda: all(is_gone(pid) for pid in pids.values()))
    assert lease_of(controller) == other


def test_a_second_agent_of_one_folder_or_of_one_node_id_is_refused(
    agent: AgentProcess, start_agent: StartAgent, tmp_path: Path
) -> None:
    same_folder = start_agent()
    same_node = start_agent(home=tmp_path / "elsewhere")
    assert same_folder.process.wait(60) == 3
    assert "another agent works in" in same_folder.log.read_text()
    assert same_node.process.wait(60) == 3
    assert "in use by another agent" in same_node.log.read_text()
    assert agent.process.poll() is None


def test_the_death_of_the_warm_process_ends_its_gangs_and_a_new_one_forks_the_next(
    agent: AgentProcess, controller: Controller
) -> None:
    pids = running(controller).pids
    warm = agent.warm()
    assert psutil.Process(pids[0]).ppid() == warm.pid
    warm.kill()
    end = ended(controller)
    assert {e.signal for e in end.exits} == {signal.SIGKILL}
    assert all("warm process" in (e.error or "") for e in end.exits)
    controller.open_job(fence=2)
    controller.send(launch(fence=2))
    assert all(e.exit_code == 0 for e in ended(controller, fence=2).exits)


def test_a_trainer_that_cannot_be_imported_refuses_the_launch_with_its_words(
    start_agent: StartAgent, controller: Controller
) -> None:
    controller.open_job()
    start_agent(MESHLOOM_TRAINER="no_such_module:train")
    command = launch()
    controller.send(command, command)
    reason = controller.fact(LaunchRefused).reason
    assert "No module named 'no_such_module'" in reason
    until(lambda: len(controller.all_of(LaunchRefused)) == 2)


def test_commands_that_came_while_no_agent_was_there_are_carried_out(
    start_agent: StartAgent, controller: Controller
) -> None:
    controller.open_job()
    controller.send(launch())
    start_agent()
    ended(controller)
    until(lambda: controller.client.xlen(redis_keys.node_inbox(NODE)) == 0)


def test_an_unreadable_command_is_refused_with_the_reason_and_the_next_are_carried_out(
    agent: AgentProcess, controller: Controller
) -> None:
    known = launch(1, 2, FOREVER, pause_s=0.01).model_dump(mode="json")
    strange = known | {"spec": known["spec"] | {"of_tomorrow": "yes"}}
    name = checkpoint_id(JOB, 10, 1)
    commit = {"kind": "commit_checkpoint", "manifest": {"checkpoint_id": name}}
    for command in (
        {},
        {"kind": "of_tomorrow", "job_id": JOB, "fence": 1},
        commit | {"job_id": JOB, "fence": 1},
        strange,
    ):
        controller.client.xadd(
            redis_keys.node_inbox(NODE), {redis_keys.MESSAGE_FIELD: json.dumps(command)}
        )
    refusal = controller.fact(LaunchRefused)
    assert (refusal.job_id, refusal.fence) == (JOB, 1)
    assert "/spec/of_tomorrow" in refusal.reason
    assert controller.fact(CheckpointLost).checkpoint_id == name
    controller.open_job(2)
    controller.send(launch(2, 2, FOREVER, pause_s=0.01))
    launched(controller, 2)
    # Sent again in words that it cannot read, the launch of ranks that live is not refused.
    controller.client.xadd(
        redis_keys.node_inbox(NODE),
        {redis_keys.MESSAGE_FIELD: json.dumps(strange | {"fence": 2})},
    )
    controller.send(StopGang(job_id=JOB, fence=2, mode="kill"))
    ended(controller, 2)
    assert [fact.fence for fact in controller.all_of(LaunchRefused)] == [1]
    assert agent.process.poll() is None


def test_the_warm_process_has_one_thread_and_ranks_are_its_children(
    agent: AgentProcess, controller: Controller
) -> None:
    controller.send(launch(1, 2, FOREVER, pause_s=0.01))
    pids = launched(controller).pids
    warm = agent.warm()
    assert warm.num_threads() == 1
    assert {psutil.Process(pid).ppid() for pid in pids.values()} == {warm.pid}
    assert os.getsid(warm.pid) == warm.pid


def test_a_users_folder_with_the_name_of_our_package_disturbs_no_rank_and_is_said(
    start_agent: StartAgent, controller: Controller, tmp_path: Path
) -> None:
    (tmp_path / "models" / "services").mkdir(parents=True)
    controller.open_job()
    start_agent(MESHLOOM_USER_PATH=f"{tmp_path}/models:{PROGRAMS}")
    controller.send(launch())
    assert all(e.exit_code == 0 for e in ended(controller).exits)
    (said,) = (line for line in controller.logs() if "is hidden by Meshloom" in line.text)
    assert (said.rank, said.level) == (0, "warning")


@pytest.mark.parametrize("slots", ["many", str(1 << 63)])
def test_bad_settings_are_named_in_one_line_each(slots: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "services.worker.agent"],
        env=child_environment(
            MESHLOOM_NODE_ID="Not A Node",
            MESHLOOM_CHECKPOINT_COPIES_GIB="inf",
            MESHLOOM_CPU_SLOTS=slots,
        ),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert answer.returncode == 2
    lines = answer.stderr.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == [
        "MESHLOOM_REDIS_URL",
        "MESHLOOM_NODE_ID",
        "MESHLOOM_CHECKPOINT_COPIES_GIB",
        "MESHLOOM_CPU_SLOTS",
    ]


def test_a_fault_of_the_agents_own_is_logged_without_its_variables() -> None:
    """To write those of a gang takes the loop a second: some such gangs would cost the node its lease."""
    code = """
import structlog
from services.worker.agent.__main__ import log_plainly
log_plainly()
def fail(held):
    try:
        raise ValueError("what happened")
    except ValueError:
        structlog.get_logger().exception("gang_fault")
fail("x" * 10)
"""
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stderr
    assert "gang_fault" in said
    assert "ValueError: what happened" in said
    assert "held" not in said


def test_no_control_character_of_what_is_logged_reaches_a_terminal() -> None:
    """Ranks choose names of folders; the agent logs that it removes them."""
    code = r"""
import structlog
from services.worker.agent.__main__ import log_plainly
log_plainly()
name = "ckpt_\x1b]0;title\x07\x1b[2J\x9b31m\u202e\x7f"
log = structlog.get_logger()
log.info("removed", checkpoint=name)
log.info("not_removed", why=f"is not empty: {name}")
try:
    raise ValueError(f"{name}\nand more")
except ValueError:
    log.exception("gang_fault")
"""
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True
    ).stderr.decode()
    assert r"checkpoint=ckpt_\x1b]0;title\x07\x1b[2J\x9b31m\u202e\x7f" in said
    assert r"ValueError: ckpt_\x1b]0;title" in said
    assert said == harmless(said)


def test_the_health_check_tells_a_living_agent_from_a_dead_one(
    agent: AgentProcess, controller: Controller, redis_url: str
) -> None:
    until(lambda: lease_of(controller))
    assert check(redis_url) == 0
    agent.process.send_signal(signal.SIGTERM)
    agent.process.wait(60)
    assert check(redis_url) == 1
    assert check("redis://127.0.0.1:9") == 1


def check(redis_url: str) -> int:
    return subprocess.run(
        [sys.executable, "-m", "services.worker.agent", "--check"],
        env=child_environment(MESHLOOM_REDIS_URL=redis_url, MESHLOOM_NODE_ID=NODE),
        check=False,
        timeout=60,
    ).returncode
