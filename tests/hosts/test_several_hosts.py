"""A gang over two hosts: the networks in which its ranks meet, links that fail, and TLS between all of them."""

import contextlib
import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import psutil
import pytest

from meshloom.client import RestClient as Client
from meshloom.client.errors import UnreachableError
from services.contract.api.views import DiagnosisView, JobView
from services.contract.words.states import ExitReason, FailureClass, JobState, NodeState
from services.local.children import die_with_parent
from services.worker.agent.host.connections import unanswered
from tests.chaos.conftest import paced, set_pace
from tests.e2e.conftest import REST, tiny_spec
from tests.hosts.world import CONTROLLER, REDIS, TOKEN, Hosts, NotHereError, why_not_here
from tests.parts import ROOT, gone
from tests.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.redis]

PATIENCE_S: Final = 200.0
STEPS: Final = 12
JOB: Final = {
    "train": {"steps": STEPS, "global_batch": 4, "seed": 7},
    "checkpoint": {"every_steps": 4},
    "faults": {"max_restarts": 4, "hang_timeout_s": 120.0},
}
Losses = dict[int, float | None]


class World:
    """The hosts, and a client of their controller."""

    def __init__(self, hosts: Hosts, client: Client) -> None:
        self.hosts = hosts
        self.client = client

    def start(self, *names: str, **changes: str) -> None:
        """New lives of these agents, until the controller calls them ready."""
        for name in names:
            self.hosts.start_agent(name, **changes)
        until(lambda: set(names) <= self.ready(), timeout_s=PATIENCE_S)

    def ready(self) -> set[str]:
        nodes = self.client.nodes().items
        return {node.id for node in nodes if node.state is NodeState.READY and node.lease_s}

    def submit(self, orders: Path, **changes: object) -> JobView:
        return self.client.submit(tiny_spec(**{**JOB, "model": paced(orders, 0.0), **changes}))

    def job_when(self, job_id: str, condition: Callable[[JobView], bool]) -> JobView:
        def look() -> JobView | None:
            job = self.client.job(job_id)
            if condition(job):
                return job
            assert job.state not in REST, f"{job.state}: {job.reason} {job.failure}"
            return None

        return until(look, timeout_s=PATIENCE_S)

    def at_step(self, job_id: str, step: int) -> JobView:
        return self.job_when(job_id, lambda job: job.progress.step >= step)

    def finish(self, job_id: str) -> JobView:
        done = self.job_when(job_id, lambda job: job.state in REST)
        assert done.state is JobState.SUCCEEDED, (done.reason, done.failure)
        return done

    def losses(self, job_id: str) -> Losses:
        return {each.step: each.loss for each in self.client.metrics(job_id, max_points=100).items}

    def rank(self, job_id: str, rank: int) -> psutil.Process:
        def look() -> psutil.Process | None:
            pids = [each.pid for each in self.client.ranks(job_id).items if each.rank == rank]
            return psutil.Process(pids[0]) if pids and pids[0] is not None else None

        return until(look, timeout_s=PATIENCE_S)

    def first_verdict(self, job_id: str) -> DiagnosisView:
        """What ended the first attempt."""
        self.job_when(job_id, lambda job: job.restarts >= 1)
        return self.client.diagnosis(job_id)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    why_not = why_not_here()
    if why_not is not None:
        pytest.skip(why_not)
    with (
        Hosts(tmp_path_factory.mktemp("hosts"), {"a": 1, "b": 1}) as hosts,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SSL_CERT_FILE", str(hosts.certificate("ca")))
        with Client(hosts.url, TOKEN, patience_s=60) as client:
            yield World(hosts, client)


@pytest.fixture(scope="module")
def alone(world: World) -> Losses:
    """The losses of the job on one host."""
    world.start("a", MESHLOOM_CPU_SLOTS="2")
    job = world.submit(world.hosts.folder / "no-orders")
    assert nodes_of(world.finish(job.id)) == ["a", "a"]
    return world.losses(job.id)


@pytest.fixture(scope="module")
def both(world: World, alone: Losses) -> Losses:
    """Both agents as they are by default; the losses of one host."""
    world.start("a", "b")
    return alone


def test_by_default_ranks_meet_where_redis_is_reached_and_no_host_needs_the_controller(
    world: World, both: Losses
) -> None:
    hosts = world.hosts
    for name in ("a", "b"):
        hosts.cut(CONTROLLER, name)
    before = hosts.received("a", "data")
    job = world.submit(hosts.folder / "no-orders")
    done = world.finish(job.id)
    for name in ("a", "b"):
        hosts.heal(CONTROLLER, name)
    assert nodes_of(done) == ["a", "b"]
    assert world.losses(job.id) == both
    assert hosts.received("a", "data") - before < 100_000
    storages = {node.inventory.storage_id for node in world.client.nodes().items}
    assert len(storages - {None}) == 1


def test_two_hosts_that_lose_each_other_are_named_with_the_ranks_that_wait(
    world: World, both: Losses, tmp_path: Path
) -> None:
    job = world.submit(tmp_path, faults={"max_restarts": 4, "hang_timeout_s": 10.0})
    set_pace(tmp_path, 0.3)
    world.at_step(job.id, 1)
    world.hosts.cut("a", "b")
    found = world.first_verdict(job.id)
    world.hosts.heal("a", "b")
    set_pace(tmp_path, 0.0)
    assert found.verdict is FailureClass.NETWORK, found.summary
    assert "nodes a and b do not reach each other" in found.summary
    assert "rank 0 on a waits for" in found.summary or "rank 1 on b waits for" in found.summary
    assert any("sent again" in line for line in found.evidence)
    world.finish(job.id)
    assert world.losses(job.id) == both
    assert world.client.attempts(job.id).items[0].exit_reason is ExitReason.HANG


def test_a_slow_and_lossy_link_that_even_breaks_for_a_while_costs_no_attempt(
    world: World, both: Losses, tmp_path: Path
) -> None:
    """25 ms each way, 2.5 MB a second; of what comes to each host, from Redis too, 3 % are lost."""
    hosts = world.hosts
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hosts.slow("a", "b", delay_s=0.025, rate=2.5e6))
            lost = [stack.enter_context(hosts.losing(name, 30)) for name in ("a", "b")]
        except NotHereError as reason:
            pytest.skip(str(reason))
        assert hosts.round_trip_s("a", "b") >= 0.05
        set_pace(tmp_path, 0.1)
        job = world.submit(tmp_path)
        world.at_step(job.id, 1)
        ranks = [world.rank(job.id, number).pid for number in (0, 1)]
        with hosts.losing("b", 999, source="a"):
            until(lambda: any(map(unanswered, ranks)), timeout_s=PATIENCE_S)
        done = world.finish(job.id)
        assert all(each.packets for each in lost)
    assert (done.attempt, nodes_of(done)) == (1, ["a", "b"])
    assert world.losses(job.id) == both


def test_a_link_that_loses_nearly_all_is_named(world: World, both: Losses, tmp_path: Path) -> None:
    job = world.submit(tmp_path, faults={"max_restarts": 4, "hang_timeout_s": 10.0})
    set_pace(tmp_path, 0.3)
    world.at_step(job.id, 1)
    with contextlib.ExitStack() as stack:
        for name, source in (("a", "b"), ("b", "a")):
            try:
                stack.enter_context(world.hosts.losing(name, 970, source=source))
            except NotHereError as reason:
                pytest.skip(str(reason))
        found = world.first_verdict(job.id)
    set_pace(tmp_path, 0.0)
    assert found.verdict is FailureClass.NETWORK, found.summary
    assert "nodes a and b do not reach each other" in found.summary
    world.finish(job.id)
    assert world.losses(job.id) == both


def test_ranks_that_cannot_meet_are_ended_soon_and_the_link_is_named(
    world: World, both: Losses, tmp_path: Path
) -> None:
    world.hosts.cut("a", "b")
    job = world.submit(tmp_path, faults={"max_restarts": 4, "hang_timeout_s": 600.0})
    found = world.first_verdict(job.id)
    world.hosts.heal("a", "b")
    assert found.verdict is FailureClass.NETWORK, found.summary
    assert "nodes a and b do not reach each other" in found.summary
    assert any("the opening of a connection" in line for line in found.evidence)
    world.finish(job.id)
    assert world.losses(job.id) == both
    assert world.client.attempts(job.id).items[0].exit_reason is ExitReason.HANG


def test_a_host_that_loses_redis_is_fenced_and_the_verdict_says_that_its_ranks_lived(
    world: World, both: Losses, tmp_path: Path
) -> None:
    job = world.submit(tmp_path)
    set_pace(tmp_path, 1.0)
    world.at_step(job.id, 1)
    zombie = world.rank(job.id, 1)
    world.hosts.cut("b", REDIS)
    found = world.first_verdict(job.id)
    world.hosts.heal("b", REDIS)
    set_pace(tmp_path, 0.0)
    assert found.verdict is FailureClass.NODE_LOST
    assert "b is lost" in found.summary
    assert "between b and Redis" in found.summary
    world.finish(job.id)
    until(lambda: gone([zombie]), timeout_s=PATIENCE_S)
    assert world.losses(job.id) == both


def test_ranks_meet_in_the_network_that_is_named_and_it_may_have_ipv6_alone(
    world: World, both: Losses
) -> None:
    world.start("a", "b", MESHLOOM_INTERFACE="data")
    before = world.hosts.received("a", "data")
    job = world.submit(world.hosts.folder / "no-orders")
    assert nodes_of(world.finish(job.id)) == ["a", "b"]
    assert world.losses(job.id) == both
    assert world.hosts.received("a", "data") - before > 1_000_000


def test_hosts_that_have_ipv6_alone_reach_redis_and_each_other(world: World, both: Losses) -> None:
    hosts = world.hosts
    with contextlib.ExitStack() as stack:
        for name in ("a", "b"):
            hosts.nodes[name].stop()
            own = hosts.hosts[name]
            address = (f"{own.mgmt}/24", "dev", "mgmt")
            own.run("ip", "address", "del", *address)
            stack.callback(own.run, "ip", "address", "add", *address)
            stack.callback(hosts.nodes[name].stop)
        world.start("a", "b", MESHLOOM_REDIS_URL=hosts.address_of_redis(ipv6=True))
        before = hosts.received("a", "data")
        job = world.submit(hosts.folder / "no-orders")
        assert nodes_of(world.finish(job.id)) == ["a", "b"]
        assert world.losses(job.id) == both
        assert hosts.received("a", "data") - before < 100_000


def test_an_agent_whose_network_comes_up_late_waits_for_it_and_gives_no_address_of_loopback(
    world: World,
) -> None:
    own = world.hosts.hosts["a"]
    node = world.hosts.nodes["a"]
    node.stop()
    before = len(node.log.read_bytes())
    route = ("10.71.0.0/24", "dev", "mgmt", "scope", "link", "src", own.mgmt)
    own.run("ip", "route", "del", *route)
    try:
        world.hosts.start_agent("a")
        until(lambda: b"nothing leads from this node to Redis" in node.log.read_bytes()[before:])
    finally:
        own.run("ip", "route", "add", *route)
    until(lambda: "a" in world.ready(), timeout_s=PATIENCE_S)
    assert f"address={own.mgmt} interface=mgmt" in node.log.read_bytes()[before:].decode()


def test_an_interface_that_is_not_there_is_refused_at_the_start_with_what_is_there(
    world: World,
) -> None:
    own, node = world.hosts.hosts["a"], world.hosts.nodes["a"]
    node.stop()
    before = len(node.log.read_bytes())
    world.hosts.start_agent("a", MESHLOOM_INTERFACE="dat0")
    assert node.process is not None
    assert node.process.wait(PATIENCE_S) == 2
    said = node.log.read_bytes()[before:].decode()
    assert "MESHLOOM_INTERFACE: there is no interface 'dat0'; there are lo" in said
    assert f"mgmt ({own.mgmt}, {own.mgmt6})" in said
    assert f"data ({own.data})" in said
    assert "spare (down)" in said


FIND: Final = """
import sys
from services.worker.agent.host.network import NetworkError, find_network
interface, address, redis_url = (each or None for each in sys.argv[1:])
try:
    print(find_network(interface, address, redis_url))
except NetworkError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("interface", "address", "redis_host", "found"),
    [
        ("spare", "", REDIS, "MESHLOOM_INTERFACE: spare is down; there are"),
        ("", "10.72.0.99", REDIS, "no interface of this node has 10.72.0.99; there are"),
        ("data", "fd71::3", REDIS, "fd71::3 is none of interface data, which has fd72::3"),
        ("data", "", REDIS, "address='fd72::3', interface='data', addresses=('fd72::3',)"),
        ("mgmt", "fd71::3", REDIS, "address='fd71::3', interface='mgmt'"),
        ("", "fd72::3", REDIS, "address='fd72::3', interface='data'"),
        ("", "", "[fd71::1]", "address='fd71::3', interface='mgmt'"),
        ("", "", "localhost", "address='127.0.0.1', interface='lo'"),
        ("", "", "192.0.2.1", "nothing leads from this node to Redis at 192.0.2.1: Network is un"),
    ],
)
def test_the_network_of_a_host_with_several_interfaces(
    world: World, interface: str, address: str, redis_host: str, found: str
) -> None:
    own = world.hosts.hosts["a"]
    host = world.hosts.hosts[REDIS].mgmt if redis_host == REDIS else redis_host
    url = f"rediss://{host}:6379"
    assert found in own.run(sys.executable, "-c", FIND, interface, address, url)


def test_certificates_of_another_authority_are_refused_and_renewed_ones_are_served(
    world: World, tmp_path: Path
) -> None:
    hosts = world.hosts
    other = tmp_path / "other"
    script = ROOT / "deploy" / "certificates.sh"
    subprocess.run([script, other, REDIS], check=True, capture_output=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(other / "ca.crt"))
        with Client(hosts.url, TOKEN) as client, pytest.raises(UnreachableError) as refused:
            client.version()
    assert "is not trusted" in str(refused.value)
    assert "SSL_CERT_FILE" in str(refused.value)
    node = hosts.nodes["a"]
    node.stop()
    before = len(node.log.read_bytes())
    hosts.start_agent("a", MESHLOOM_REDIS_CA=str(other / "ca.crt"))
    until(lambda: b"MESHLOOM_REDIS_CA" in node.log.read_bytes()[before:], timeout_s=PATIENCE_S)
    assert "a" not in world.ready()

    port = int(hosts.url.rpartition(":")[2])
    served = ssl.get_server_certificate(("127.0.0.1", port))
    hosts.make_certificates(f"{CONTROLLER},127.0.0.1", f"{REDIS},{hosts.hosts[REDIS].mgmt}")
    until(lambda: ssl.get_server_certificate(("127.0.0.1", port)) != served, timeout_s=PATIENCE_S)
    assert hosts.served_by_redis() != hosts.certificate(REDIS).read_text().strip()
    hosts.renew_redis()
    assert hosts.served_by_redis() == hosts.certificate(REDIS).read_text().strip()
    world.start("a")
    assert world.client.version().version


def test_another_authority_takes_over_while_a_job_trains_and_nothing_is_started_again(
    world: World, both: Losses, tmp_path: Path
) -> None:
    hosts = world.hosts
    world.start("a", "b")
    former = tmp_path / "former"
    shutil.copytree(hosts.certificates, former)
    newer = tmp_path / "newer"
    script = ROOT / "deploy" / "certificates.sh"
    servers = (f"{REDIS},{hosts.hosts[REDIS].mgmt}", f"{CONTROLLER},127.0.0.1")
    subprocess.run([script, newer, *servers], check=True, capture_output=True)
    port = int(hosts.url.rpartition(":")[2])
    trusted = hosts.certificate("ca")

    def serve(folder: Path) -> None:
        for path in (each for name in (REDIS, CONTROLLER) for each in folder.glob(f"{name}.*")):
            put(path.read_bytes(), hosts.certificates / path.name)
        hosts.renew_redis()
        assert hosts.served_by_redis() == (folder / f"{REDIS}.crt").read_text().strip()
        expected = (folder / f"{CONTROLLER}.crt").read_text().strip()
        until(
            lambda: ssl.get_server_certificate(("127.0.0.1", port)).strip() == expected,
            timeout_s=PATIENCE_S,
        )

    with contextlib.ExitStack() as stack:
        stack.callback(serve, former)
        stack.callback(shutil.copy, former / "ca.crt", trusted)
        put((former / "ca.crt").read_bytes() + (newer / "ca.crt").read_bytes(), trusted)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("SSL_CERT_FILE", str(trusted))
        now = World(hosts, stack.enter_context(Client(hosts.url, TOKEN, patience_s=60)))
        set_pace(tmp_path, 0.5)
        job = now.submit(tmp_path)
        now.at_step(job.id, 1)
        serve(newer)
        put((newer / "ca.crt").read_bytes(), trusted)
        # All connect again, and now trust the new authority alone.
        hosts.drop_connections_to_redis()
        step = now.client.job(job.id).progress.step
        now.at_step(job.id, step + 2)
        set_pace(tmp_path, 0.0)
        done = now.finish(job.id)
        assert (done.attempt, done.restarts) == (1, 0)
        assert now.losses(job.id) == both
        patch.setenv("SSL_CERT_FILE", str(former / "ca.crt"))
        with Client(hosts.url, TOKEN) as late, pytest.raises(UnreachableError):
            late.version()


def put(content: bytes, path: Path) -> None:
    """Replace a file at once, as those who renew certificates do."""
    draft = path.with_suffix(".draft")
    draft.write_bytes(content)
    draft.replace(path)


def test_gathers_that_are_dropped_between_two_hosts_leave_their_ranks_in_step(
    world: World, tmp_path: Path
) -> None:
    command = (sys.executable, "-m", "tests.hosts.exchange")
    address = world.hosts.hosts["a"].mgmt
    parts = [
        subprocess.Popen(
            world.hosts.hosts[name].command(
                *("env", "GLOO_SOCKET_IFNAME=mgmt", *command, str(number), address, "29400"),
                tmp_path,
            ),
            cwd=ROOT,
            preexec_fn=die_with_parent,  # noqa: PLW1509 prctl is one call and takes no lock
        )
        for number, name in enumerate(("a", "b"))
    ]
    try:
        assert [part.wait(PATIENCE_S) for part in parts] == [0, 0]
    finally:
        for part in parts:
            part.kill()
            part.wait()
    for rank in range(4):
        plain, dropped = (tmp_path / f"{kind}-{rank}" for kind in ("plain", "dropped"))
        assert plain.read_bytes() == dropped.read_bytes()


def nodes_of(job: JobView) -> list[str]:
    assert job.plan is not None
    return [rank.node_id for rank in job.plan.ranks]
