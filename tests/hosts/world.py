"""Several hosts on one machine: network namespaces on two bridges, with all that speaks over TLS.

Every host has an interface ``mgmt`` (IPv4 and IPv6), by which it reaches Redis; those of agents also ``data``
(IPv6 alone), a network of its own, and ``spare``, which is down. As Debian does it, the file ``hosts`` of each
gives the machine's name an address of loopback. Nothing outside reaches any of it but the test, by a relay.

Each agent has the storage of checkpoints by a mount of its own (``shared_storage``) where FUSE can be used.

A line between two hosts is cut by what they believe about each other's Ethernet address: their kernels send real
frames, which nothing takes. So it needs no filter in the kernel, and both directions are cut or one. A line that is slow is a relay
of ours between two TUN interfaces (``slow_link``), one that loses packets a rule of nftables.
"""

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from redis import Redis

from services.local.children import die_with_parent
from services.local.embedded_redis import redis_program, wait_for_redis
from services.local.settings import child_environment
from tests.e2e.conftest import free_port
from tests.hosts import shared_storage, slow_link
from tests.parts import ROOT, Node, Part

REDIS: Final = "redis"
CONTROLLER: Final = "controller"
TOKEN: Final = "4f1c" * 16
_PREFIX: Final = "meshloom"
_NAMES: Final = Path("/etc/netns")
_TAKEN_BY_NONE: Final = "02:00:00:00:00:fe"
_PORT: Final = 8400
_REDIS_PORT: Final = 6379


_LOSSES: Final = """
table inet {table} {{
  chain arriving {{
    type filter hook prerouting priority raw
    iifname != "lo" {of} numgen random mod 1000 < {per_mille} counter drop
  }}
}}
"""


class NotHereError(Exception):
    """This machine cannot make such a line; the text says why."""


def why_not_here() -> str | None:
    """Why no hosts can be made here; None: they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("openssl") is None:
        return "not installed: iproute2 or openssl"
    probe = f"{_PREFIX}-{os.getpid()}-probe"
    make = (
        ("netns", "add", probe),
        ("-n", probe, "link", "add", "name", "bridge0", "type", "bridge"),
    )
    pair = ("-n", probe, "link", "add", "name", "one", "type", "veth", "peer", "name", "other")
    try:
        for words in (*make, pair):
            made = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
            if made.returncode:
                return f"`ip {' '.join(words)}` is refused: {made.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", probe], check=False, stderr=subprocess.DEVNULL)
    return None


@dataclass(frozen=True)
class Host:
    """One host: ``number`` is the last part of its addresses."""

    name: str
    number: int

    @property
    def namespace(self) -> str:
        """Its network namespace."""
        return f"{_PREFIX}-{os.getpid()}-{self.name}"

    @property
    def mgmt(self) -> str:
        """Its address on ``mgmt``."""
        return f"10.71.0.{self.number}"

    @property
    def mgmt6(self) -> str:
        """That by IPv6."""
        return f"fd71::{self.number}"

    @property
    def data(self) -> str:
        """Its address on ``data``."""
        return f"fd72::{self.number}"

    def command(self, *words: str | Path) -> list[str | Path]:
        """``words`` as a command in this host."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def run(self, *words: str) -> str:
        """What a command in this host prints."""
        return subprocess.run(
            self.command(*words), check=True, capture_output=True, text=True
        ).stdout


@dataclass(frozen=True)
class Losses:
    """What a host loses by one rule."""

    host: Host
    table: str

    @property
    def packets(self) -> int:
        """How many so far."""
        listed = self.host.run("nft", "list", "table", "inet", self.table)
        return int(listed.partition("packets ")[2].split()[0])


class Hosts:
    """The hosts of Redis and the controller, and one for each agent; use it as a context manager.

    Args:
        folder: Empty, for all files.
        agents: Names of hosts, and how many CPU ranks each takes.

    Attributes:
        hosts: By name.
        nodes: The agents, by their hosts' names; ``start_agent`` starts one.
        redis: The server.
        controller: The only one.
        url: Where the test reaches the controller.
        redis_url: Where the test reaches Redis.
        certificates: The folder that ``deploy/certificates.sh`` filled.
    """

    def __init__(self, folder: Path, agents: Mapping[str, int]) -> None:
        self.folder = folder
        self.certificates = folder / "certificates"
        self.storage = folder / "checkpoints"
        self._slots = agents
        names = [REDIS, CONTROLLER, *agents]
        self.hosts = {name: Host(name, number) for number, name in enumerate(names, start=1)}
        self.nodes: dict[str, Node] = {}
        self._roots: dict[str, Path] = {}
        self._environment = {
            name: value
            for name, value in child_environment().items()
            if not name.startswith("MESHLOOM_")
        }

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            _sweep()
            self._add_switch(stack)
            for host in self.hosts.values():
                self._add_host(host, stack)
            redis = self.hosts[REDIS]
            self.make_certificates(f"{REDIS},{redis.mgmt},{redis.mgmt6}", f"{CONTROLLER},127.0.0.1")
            self._start_redis(stack)
            self._start_controller(stack)
            for name in self._slots:
                self._add_node(name, stack)
            self._parts = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    def make_certificates(self, *servers: str) -> None:
        """New certificates for these servers, by the authority that is there."""
        script = ROOT / "deploy" / "certificates.sh"
        subprocess.run([script, self.certificates, *servers], check=True, capture_output=True)

    def certificate(self, name: str) -> Path:
        """A server's certificate, or the authority's (``ca``)."""
        return self.certificates / f"{name}.crt"

    def key(self, name: str) -> Path:
        """A server's key."""
        return self.certificates / f"{name}.key"

    def served_by_redis(self) -> str:
        """The certificate with which Redis answers, as PEM."""
        ask = "import ssl, sys; print(ssl.get_server_certificate((sys.argv[1], int(sys.argv[2]))))"
        host = self.hosts[REDIS]
        return host.run(sys.executable, "-c", ask, host.mgmt, str(_REDIS_PORT)).strip()

    def renew_redis(self) -> None:
        """Have Redis take the files of its certificate as they are now."""
        files = {"tls-cert-file": self.certificate(REDIS), "tls-key-file": self.key(REDIS)}
        with Redis.from_url(self.redis_url) as server:
            server.execute_command(
                "CONFIG SET", *itertools.chain(*((name, str(path)) for name, path in files.items()))
            )

    def drop_connections_to_redis(self) -> None:
        """Close those of agents and controllers, who then connect again."""
        with Redis.from_url(self.redis_url) as server:
            server.execute_command("CLIENT KILL", "TYPE", "normal", "SKIPME", "yes")

    def start_agent(self, name: str, **changes: str) -> Node:
        """A new life of an agent, its environment changed for this life.

        Args:
            name: Of its host.
            changes: Of its variables; an empty one is left out.
        """
        node = self.nodes[name]
        node.stop()
        environment = self._agent_environment(name) | changes
        node.environment = {key: value for key, value in environment.items() if value}
        node.start()
        return node

    def cut(self, one: str, other: str) -> None:
        """From now on no frame between two hosts arrives, and neither learns of it."""
        for host, peer in self._both_ways(one, other):
            for interface, address in self._ways(host, peer):
                host.run(
                    *("ip", "neighbour", "replace", address, "dev", interface),
                    *("lladdr", _TAKEN_BY_NONE, "nud", "permanent"),
                )

    def heal(self, one: str, other: str) -> None:
        """Undo ``cut``."""
        for host, peer in self._both_ways(one, other):
            for interface, address in self._ways(host, peer):
                host.run("ip", "neighbour", "del", address, "dev", interface)

    @contextlib.contextmanager
    def slow(self, one: str, other: str, *, delay_s: float, rate: float) -> Iterator[None]:
        """Within, what two hosts send each other over ``mgmt`` by IPv4 takes so long each way, and so many bytes a second.

        Raises:
            NotHereError: There are no TUN interfaces.
        """
        if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
            raise NotHereError("there is no /dev/net/tun")
        hosts = (self.hosts[one], self.hosts[other])
        script = ROOT / "tests" / "hosts" / "slow_link.py"
        relay = subprocess.Popen(
            hosts[0].command(sys.executable, script, hosts[1].namespace, str(delay_s), str(rate)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 prctl is one call and takes no lock
        )
        try:
            assert relay.stdout is not None
            assert relay.stderr is not None
            if not relay.stdout.readline():
                raise NotHereError(relay.stderr.read().strip().rpartition("\n")[2])
            for host, peer in (hosts, hosts[::-1]):
                host.run("ip", "link", "set", slow_link.INTERFACE, "up")
                way = (f"{peer.mgmt}/32", "dev", slow_link.INTERFACE, "src", host.mgmt)
                host.run("ip", "route", "add", *way)
            yield
        finally:
            relay.kill()  # the interfaces and the routes go with it
            relay.communicate()

    @contextlib.contextmanager
    def losing(self, name: str, per_mille: int, *, source: str | None = None) -> Iterator["Losses"]:
        """Within, a host loses so many of a thousand packets that come, of all hosts or of one.

        Raises:
            NotHereError: There is no nftables with random numbers.
        """
        if shutil.which("nft") is None:
            raise NotHereError("not installed: nftables")
        host = self.hosts[name]
        table = f"losses-{per_mille}-{source or 'all'}"
        of = "" if source is None else f"ip saddr {self.hosts[source].mgmt}"
        rules = _LOSSES.format(table=table, of=of, per_mille=per_mille)
        made = subprocess.run(
            host.command("nft", "-f", "-"), input=rules, capture_output=True, text=True, check=False
        )
        if made.returncode:
            raise NotHereError(f"nft: {made.stderr.strip()}")
        try:
            yield Losses(host, table)
        finally:
            host.run("nft", "delete", "table", "inet", table)

    def round_trip_s(self, one: str, other: str) -> float:
        """How long the opening of a connection from one host to the other takes."""
        peer = self.hosts[other]
        ask = (
            "import socket, sys, time\n"
            "began = time.monotonic()\n"
            "try: socket.create_connection((sys.argv[1], 9), 30)\n"
            "except ConnectionRefusedError: print(time.monotonic() - began)"
        )
        return float(self.hosts[one].run(sys.executable, "-c", ask, peer.mgmt))

    def received(self, name: str, interface: str) -> int:
        """Bytes that have come into a host by this interface."""
        shown = json.loads(
            self.hosts[name].run("ip", "-json", "-statistics", "link", "show", interface)
        )
        return int(shown[0]["stats64"]["rx"]["bytes"])

    def _both_ways(self, one: str, other: str) -> tuple[tuple[Host, Host], ...]:
        return (
            (self.hosts[one], self.hosts[other]),
            (self.hosts[other], self.hosts[one]),
        )

    def _ways(self, host: Host, peer: Host) -> Sequence[tuple[str, str]]:
        ways = [("mgmt", peer.mgmt), ("mgmt", peer.mgmt6)]
        both = {host.name, peer.name} <= set(self._slots)
        return [*ways, ("data", peer.data)] if both else ways

    def _add_switch(self, stack: contextlib.ExitStack) -> None:
        self._switch = Host("switch", 0)
        _make_namespace(self._switch, stack)
        for network in ("mgmt", "data"):
            self._switch.run("ip", "link", "add", "name", network, "type", "bridge")
            self._switch.run("ip", "link", "set", network, "up")

    def _add_host(self, host: Host, stack: contextlib.ExitStack) -> None:
        names = _NAMES / host.namespace
        names.mkdir(parents=True)
        stack.callback(shutil.rmtree, names)
        (names / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
        _make_namespace(host, stack)
        host.run("ip", "link", "set", "lo", "up")
        self._give(host, "mgmt", f"{host.mgmt}/24", f"{host.mgmt6}/64")
        if host.name in self._slots:
            self._give(host, "data", f"{host.data}/64")
            host.run("ip", "link", "add", "spare", "type", "veth", "peer", "name", "unplugged")

    def _give(self, host: Host, network: str, *addresses: str) -> None:
        cable = f"{host.name}-{network}"
        self._switch.run(
            *("ip", "link", "add", cable, "type", "veth"),
            *("peer", "name", network, "netns", host.namespace),
        )
        self._switch.run("ip", "link", "set", cable, "master", network, "up")
        host.run("ip", "link", "set", network, "up")
        for address in addresses:
            nodad = ["nodad"] if ":" in address else []
            host.run("ip", "address", "add", address, "dev", network, *nodad)

    def _start_redis(self, stack: contextlib.ExitStack) -> None:
        program = stack.enter_context(redis_program(self.folder / "redis"))
        host = self.hosts[REDIS]
        self.redis_url = program.url
        self._password = program.url.removeprefix("unix://:").partition("@")[0]
        command = host.command(
            *program.command,
            *("--tls-port", str(_REDIS_PORT), "--bind", host.mgmt, host.mgmt6),
            *("--tls-cert-file", self.certificate(REDIS), "--tls-key-file", self.key(REDIS)),
            *("--tls-ca-cert-file", self.certificate("ca"), "--tls-auth-clients", "no"),
        )
        self.redis = Part(REDIS, command, self._environment, program.log)
        self._start(self.redis, stack)
        wait_for_redis(program.url)

    def _start_controller(self, stack: contextlib.ExitStack) -> None:
        host = self.hosts[CONTROLLER]
        environment = self._environment | {
            "MESHLOOM_REDIS_URL": self._redis_address(self.hosts[REDIS].mgmt),
            "MESHLOOM_REDIS_CA": str(self.certificate("ca")),
            "MESHLOOM_HOST": "127.0.0.1",
            "MESHLOOM_PORT": str(_PORT),
            "MESHLOOM_TOKEN": TOKEN,
            "MESHLOOM_FACTORY_PREFIXES": "*",
            "MESHLOOM_TLS_CERT": str(self.certificate(CONTROLLER)),
            "MESHLOOM_TLS_KEY": str(self.key(CONTROLLER)),
        }
        command = host.command(sys.executable, "-m", "services.controller")
        self.controller = Part(CONTROLLER, command, environment, self.folder / "controller.log")
        self._start(self.controller, stack)
        port = free_port()
        self.url = f"https://127.0.0.1:{port}"
        self._relay(port, host, "127.0.0.1", stack)

    def _relay(self, port: int, host: Host, address: str, stack: contextlib.ExitStack) -> None:
        with socket.create_server(("127.0.0.1", port)) as listener:
            relay = subprocess.Popen(
                host.command(
                    *(sys.executable, ROOT / "tests" / "hosts" / "relay.py"),
                    *(str(listener.fileno()), address, str(_PORT)),
                ),
                pass_fds=[listener.fileno()],
                preexec_fn=die_with_parent,  # noqa: PLW1509 prctl is one call and takes no lock
            )
        stack.callback(relay.wait)
        stack.callback(relay.kill)

    def _add_node(self, name: str, stack: contextlib.ExitStack) -> None:
        home = self.folder / "homes" / name
        self._roots[name] = self.storage
        if shared_storage.why_not_here() is None:
            own = shared_storage.mounted(self.storage, self.folder / "mounts" / name)
            self._roots[name] = stack.enter_context(own)
        command = self.hosts[name].command(sys.executable, "-m", "services.worker.agent")
        environment = self._agent_environment(name)
        self.nodes[name] = Node(name, command, environment, self.folder / f"{name}.log", home=home)
        stack.callback(self.nodes[name].stop)

    def _agent_environment(self, name: str) -> dict[str, str]:
        return self._environment | {
            "MESHLOOM_REDIS_URL": self._redis_address(self.hosts[REDIS].mgmt),
            "MESHLOOM_REDIS_CA": str(self.certificate("ca")),
            "MESHLOOM_HOME": str(self.folder / "homes" / name),
            "MESHLOOM_CHECKPOINT_ROOT": str(self._roots[name]),
            "MESHLOOM_NODE_ID": name,
            "MESHLOOM_CPU_SLOTS": str(self._slots[name]),
            "MESHLOOM_MEASURE_IDLE_S": "0",
            "MESHLOOM_USER_PATH": str(ROOT / "tests" / "chaos" / "user_models"),
        }

    def address_of_redis(self, *, ipv6: bool = False) -> str:
        """The URL by which agents reach Redis."""
        host = self.hosts[REDIS]
        return self._redis_address(f"[{host.mgmt6}]" if ipv6 else host.mgmt)

    def _redis_address(self, host: str) -> str:
        return f"rediss://:{self._password}@{host}:{_REDIS_PORT}"

    def _start(self, part: Part, stack: contextlib.ExitStack) -> None:
        stack.callback(part.stop)
        part.start()


def _make_namespace(host: Host, stack: contextlib.ExitStack) -> None:
    subprocess.run(["ip", "netns", "add", host.namespace], check=True)
    stack.callback(subprocess.run, ["ip", "netns", "del", host.namespace], check=True)


def namespaces() -> Sequence[str]:
    """Those of this kind that there are."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    names = [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]
    return [name for name in names if name.startswith(f"{_PREFIX}-")]


def _sweep() -> None:
    """Remove the hosts of test processes that were killed."""
    for name in namespaces():
        owner = name.split("-")[1]
        if not Path(f"/proc/{owner}").exists():
            subprocess.run(["ip", "netns", "del", name], check=True)
            shutil.rmtree(_NAMES / name, ignore_errors=True)
