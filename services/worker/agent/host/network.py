"""The network in which this node's ranks meet those of other nodes."""

import socket
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import psutil

_LOOPBACK: Final = "127.0.0.1"
_REDIS_PORT: Final = 6379


@dataclass(frozen=True)
class Network:
    """Where other nodes reach this one, and the interface that has this address, where one has."""

    address: str
    interface: str | None


def find_network(address: str | None, redis_url: str) -> Network:
    """The network of ``address``, or else the one through which this node reaches Redis."""
    found = address or _address_towards(redis_url)
    return Network(found, _interface_of(found))


def _address_towards(redis_url: str) -> str:
    """The address from which this node reaches Redis; loopback where Redis is on this machine.

    Nodes that share a Redis reach each other in the same network, as a rule; where they do not,
    ``MESHLOOM_ADDRESS`` says which one they do.
    """
    parts = urlsplit(redis_url)
    if parts.hostname is None:  # a unix socket
        return _LOOPBACK
    try:
        (family, kind, _, _, target), *_ = socket.getaddrinfo(
            parts.hostname, parts.port or _REDIS_PORT, type=socket.SOCK_DGRAM
        )
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # a datagram socket sends nothing: it only takes a route
            return str(probe.getsockname()[0])
    except OSError:
        # The name may not resolve yet; a gang on this node alone needs no other address.
        return _LOOPBACK


def _interface_of(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    # All of 127.0.0.0/8 is this machine, of which the interface names one.
    return "lo" if address.startswith("127.") and "lo" in psutil.net_if_addrs() else None
