"""Settings, inventory and folders of a node."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.contract.messages.facts import Device, LaunchRefused
from services.contract.messages.warm_channel import NODE_MARK
from services.contract.system.durable import append_plain
from services.local.settings import child_environment
from services.worker.agent.gangs.leftovers import find_leftovers
from services.worker.agent.host.devices import parse_devices, take_inventory
from services.worker.agent.host.folders import NodeBusyError, NodeFolder
from services.worker.agent.ranks.template_link import last_words
from services.worker.agent.settings import AgentSettings, rank_environment
from tests.agent.conftest import JOB, NODE, launch


def settings(**changes: str) -> AgentSettings:
    return AgentSettings.model_validate({"redis_url": "redis://x", **changes})


def folder(tmp_path: Path) -> NodeFolder:
    return NodeFolder(tmp_path, NODE, shared_memory=tmp_path)


def test_gpus_are_read_from_the_drivers_listing() -> None:
    listing = "0, NVIDIA H200, 143771\n1, Odd, Name, 16\nno devices were found\n"
    assert parse_devices(listing) == (
        Device(index=0, name="NVIDIA H200", memory_bytes=143771 << 20),
        Device(index=1, name="Odd, Name", memory_bytes=16 << 20),
    )


def test_an_inventory_tells_slots_and_memory() -> None:
    inventory = take_inventory(cpu_slots=3)
    assert inventory.cpu_slots == 3
    assert inventory.cpu_count >= 1
    assert inventory.memory_bytes > 1 << 20


def test_a_folder_has_one_agent_at_a_time(tmp_path: Path) -> None:
    first, second = folder(tmp_path), folder(tmp_path)
    with first.locked(), pytest.raises(NodeBusyError, match="MESHLOOM_NODE_ID"), second.locked():
        pass
    with second.locked():
        pass


def test_a_home_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    home = tmp_path / "a file"
    home.touch()
    settings = {"MESHLOOM_REDIS_URL": "redis://nowhere", "MESHLOOM_NODE_ID": NODE}
    done = subprocess.run(
        [sys.executable, "-m", "services.worker.agent"],
        env=child_environment(**settings, MESHLOOM_HOME=str(home)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"meshloom agent: MESHLOOM_HOME: {home}/nodes/{NODE} cannot be u")
    assert len(done.stderr.splitlines()) == 1


def test_a_stack_whose_home_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    home = tmp_path / "a file"
    home.touch()
    done = subprocess.run(
        [sys.executable, "-m", "services.local", "up"],
        env=child_environment(MESHLOOM_HOME=str(home), COLUMNS="1000"),
        capture_output=True,
        text=True,
        check=False,
    )
    said = (done.stdout + done.stderr).splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"meshloom: MESHLOOM_HOME: {home} cannot be used: ")


def test_a_home_may_have_a_name_that_is_no_text(tmp_path: Path) -> None:
    named = NodeFolder(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")), NODE, tmp_path)
    with named.locked():
        assert named.mark != NodeFolder(tmp_path, NODE, tmp_path).mark


def test_an_attempt_is_opened_once_and_unfinished_until_its_end_is_recorded(
    tmp_path: Path,
) -> None:
    attempt = folder(tmp_path).attempt(JOB, 3)
    placements = launch().plan.ranks
    assert attempt.open(placements)
    assert not attempt.open(placements)
    (unfinished,) = folder(tmp_path).unfinished()
    assert (unfinished.job_id, unfinished.fence) == (JOB, 3)
    assert unfinished.placements() == placements


def test_pipes_and_links_that_a_rank_puts_among_its_files_are_neither_waited_for_nor_followed(
    tmp_path: Path,
) -> None:
    attempt, others = folder(tmp_path).attempt(JOB, 1), tmp_path / "others"
    attempt.open(launch().plan.ranks)
    others.write_text("whole")
    (attempt.path / "ended.json.draft").symlink_to(others)
    refusal = LaunchRefused(job_id=JOB, fence=1, node_id=NODE, reason="any")
    attempt.close(refusal)
    assert attempt.ended() == refusal
    assert others.read_text() == "whole"
    for name in ("ended.json", "ended.json.draft", "launched.json"):
        (attempt.path / name).unlink(missing_ok=True)
        os.mkfifo(attempt.path / name)
    assert attempt.ended() is None
    assert attempt.placements() == ()
    attempt.close(refusal)
    assert attempt.ended() == refusal


def test_what_takes_long_to_free_is_put_aside_where_an_end_is_recorded(tmp_path: Path) -> None:
    """The loop records it, and ext4 takes 20 s for a gigabyte in pieces that a rank has put there."""
    attempt = folder(tmp_path).attempt(JOB, 1)
    attempt.path.mkdir(parents=True)
    end = LaunchRefused(job_id=JOB, fence=1, node_id=NODE, reason="no")
    for name in ("ended.json", "ended.json.draft"):
        (attempt.path / name).touch()
        os.truncate(attempt.path / name, 1 << 30)
    attempt.close(end)
    assert attempt.ended() == end
    assert len(list(attempt.path.glob("ended.json*.long"))) == 2
    attempt.close(end)
    assert len(list(attempt.path.iterdir())) == 3


@pytest.mark.parametrize("what", ["pipe", "link"])
def test_a_node_s_own_files_are_made_again_where_somebody_put_something_else_in_their_place(
    tmp_path: Path, what: str
) -> None:
    node, others = folder(tmp_path), tmp_path / "others"
    node.path.mkdir(parents=True)
    others.write_text("whole")
    for name in ("incarnation", "incarnation.draft", "agent.lock", "warm.log", "sentinel.log"):
        if what == "pipe":
            os.mkfifo(node.path / name)
        else:
            (node.path / name).symlink_to(others)
    assert node.previous_incarnation() is None
    assert last_words(node.warm_log) == ""
    with node.locked(), pytest.raises(NodeBusyError), folder(tmp_path).locked():
        pass
    node.record_incarnation("now")
    assert node.previous_incarnation() == "now"
    for log in (node.warm_log, node.sentinel_log):
        with os.fdopen(append_plain(log), "ab") as file:
            file.write(b"said")
        assert last_words(log) == "said"
    assert others.read_text() == "whole"


def test_folders_that_no_attempt_made_are_passed_over(tmp_path: Path) -> None:
    node = folder(tmp_path)
    node.attempt(JOB, 2).open(launch().plan.ranks)
    for name in (f"{JOB}/attempt-x", f"{JOB}/attempt-0", "job_none/attempt-1", "none/attempt-1"):
        odd = node.path / "jobs" / name
        odd.mkdir(parents=True)
        (odd / "launched.json").write_text("[]")
    (node.path / "jobs" / "job_file").write_text("no folder")
    assert [left.fact.fence for left in find_leftovers(node, NODE)] == [2]
    assert node.prune([JOB, "job_file"]) == []
    assert node.attempt(JOB, 2).path.is_dir()


def test_boards_are_private_to_the_user(tmp_path: Path) -> None:
    boards = folder(tmp_path).attempt(JOB, 1).boards
    assert boards.parent.parent == tmp_path
    assert boards.parent.stat().st_mode & 0o077 == 0


def test_a_board_folder_that_others_can_enter_is_not_used(tmp_path: Path) -> None:
    boards = folder(tmp_path).attempt(JOB, 1).boards
    boards.parent.chmod(0o777)
    assert folder(tmp_path).attempt(JOB, 1).boards.name == "boards"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MESHLOOM_REDIS_URL", "x"),
        ("HF_TOKEN", "x"),
        ("db_password", "x"),
        ("AWS_ACCESS_KEY_ID", "x"),
        ("SSH_AUTH_SOCK", "x"),
        ("DATA_SOURCE", "postgres://user:secret@host/db"),
        ("WHATEVER_ELSE", "x"),
        ("NVIDIA_API_KEY", "x"),
        ("TORCH_HUB_TOKEN", "x"),
        ("CACHE", "redis://host/0?password=secret"),
    ],
)
def test_what_looks_like_a_credential_is_kept_from_ranks(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert name not in rank_environment(settings(rank_env="OTHER"), "mark", None)


def test_an_agent_with_a_bucket_keeps_its_credentials_and_gives_ranks_a_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_PROFILE", "x")
    asked = settings(checkpoint_root="s3://bucket/prefix", home="/home", node_id="loom-1")
    assert str(asked.checkpoint_root) == "s3://bucket/prefix"
    assert asked.checkpoint_folder == Path("/home/copies/loom-1")
    assert not [name for name in rank_environment(asked, "mark", None) if name.startswith("AWS")]


def test_what_ranks_need_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    monkeypatch.setenv("MY_FLAG", "1")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    asked = settings(rank_env="MY_FLAG, MESHLOOM_TOKEN")
    monkeypatch.setenv("MESHLOOM_TOKEN", "x")
    environment = rank_environment(asked, "mark", "eth7")
    assert environment["MY_FLAG"] == "1"
    assert environment["LC_ALL"] == "C.UTF-8"
    assert "MESHLOOM_TOKEN" not in environment
    assert environment["GLOO_SOCKET_IFNAME"] == "eth7"
    assert environment["NCCL_SOCKET_IFNAME"] == "ib0"
    assert environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert environment["PYTHONPATH"] == "/theirs"
    assert environment[NODE_MARK] == "mark"


def test_nccl_is_given_the_interface_by_its_whole_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert rank_environment(settings(), "mark", "eth1")["NCCL_SOCKET_IFNAME"] == "=eth1"
