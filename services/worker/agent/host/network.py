"""The network in which this node's ranks meet those of other nodes."""

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import urlsplit

import psutil

_LOOPBACK: Final = "127.0.0.1"
_REDIS_PORT: Final = 6379


class NetworkError(Exception):
    """The interface or the address that the settings name cannot be used; the message says why."""


class NoRouteError(NetworkError):
    """This node has no way to Redis yet, so it is not known by which address others reach it."""


@dataclass(frozen=True)
class Network:
    """Where other nodes reach this one, and the interface that has this address, where one has.

    ``addresses``: all of that interface, of which collectives may choose another than the store.
    """

    address: str
    interface: str | None
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Interface:
    """A network interface, with its addresses: those of IPv4 first, link-local ones of IPv6 left out."""

    name: str
    is_up: bool
    addresses: tuple[str, ...]

    def __str__(self) -> str:
        """Its name, and why it cannot be used or under which addresses it can."""
        if not self.is_up:
            return f"{self.name} (down)"
        return f"{self.name} ({', '.join(self.addresses) or 'no address'})"


class _Entry(Protocol):
    """An address of an interface, as psutil lists it."""

    @property
    def family(self) -> int:
        """AF_INET, AF_INET6 or another."""

    @property
    def address(self) -> str:
        """As text."""


def find_network(interface: str | None, address: str | None, redis_url: str) -> Network:
    """The network that the settings name, or else the one through which this node reaches Redis.

    Args:
        interface: By its name; None: the one that has the address.
        address: By which other nodes reach this one; None: the first of the interface.
        redis_url: What to find the way to, where neither is given.

    Raises:
        NetworkError: There is no such interface, or it is down or has no address; or no interface
            has the address. The message lists those that there are.
        NoRouteError: Neither is given, and nothing leads to Redis: its name does not resolve, or no
            interface is up.
    """
    known = _interfaces()
    if interface is not None:
        return _named(interface, address, known)
    if address is not None and _is_foreign(address, known):
        raise NetworkError(
            f"MESHLOOM_ADDRESS: no interface of this node has {address}; there are {_listed(known)}"
        )
    found = address or _address_towards(redis_url)
    having = _having(found, known)
    if having is None:
        return Network(found, None, (found,))
    return Network(found, having.name, having.addresses or (found,))


def _named(name: str, address: str | None, known: Mapping[str, Interface]) -> Network:
    one = known.get(name)
    if one is None:
        raise NetworkError(
            f"MESHLOOM_INTERFACE: there is no interface {name!r}; there are {_listed(known)}"
        )
    if not one.is_up or not one.addresses:
        why = "is down" if not one.is_up else "has no address that other nodes could use"
        raise NetworkError(f"MESHLOOM_INTERFACE: {name} {why}; there are {_listed(known)}")
    if address is not None and address not in one.addresses and not _is_loopback(address, one):
        raise NetworkError(
            f"MESHLOOM_ADDRESS: {address} is none of interface {name}, which has "
            f"{', '.join(one.addresses)}; unset one of MESHLOOM_ADDRESS and MESHLOOM_INTERFACE"
        )
    return Network(address or one.addresses[0], name, one.addresses)


def _is_foreign(address: str, known: Mapping[str, Interface]) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False  # a name, which may not resolve yet
    return _having(address, known) is None


def _address_towards(redis_url: str) -> str:
    """The address from which this node reaches Redis; loopback where Redis is on this machine.

    Nodes that share a Redis reach each other in the same network, as a rule; where they do not,
    ``MESHLOOM_INTERFACE`` or ``MESHLOOM_ADDRESS`` says in which one they do.
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
    except OSError as error:
        raise NoRouteError(
            f"nothing leads from this node to Redis at {parts.hostname}: {error.strerror or error}; check its network, "
            "or MESHLOOM_REDIS_URL"
        ) from error


def _interfaces() -> dict[str, Interface]:
    states = psutil.net_if_stats()
    return {
        name: Interface(name, name in states and states[name].isup, _usable(entries))
        for name, entries in psutil.net_if_addrs().items()
    }


def _usable(entries: Sequence[_Entry]) -> tuple[str, ...]:
    by_family = {
        family: [entry.address for entry in entries if entry.family == family]
        for family in (socket.AF_INET, socket.AF_INET6)
    }
    # An address of the link alone needs the interface's name beside it, which differs on each host.
    wide = [each for each in by_family[socket.AF_INET6] if "%" not in each]
    return (*by_family[socket.AF_INET], *wide)


def _having(address: str, known: Mapping[str, Interface]) -> Interface | None:
    for one in known.values():
        if address in one.addresses or _is_loopback(address, one):
            return one
    return None


def _is_loopback(address: str, one: Interface) -> bool:
    # All of 127.0.0.0/8 is this machine, of which the interface names one.
    return one.name == "lo" and address.startswith("127.")


def _listed(known: Mapping[str, Interface]) -> str:
    return ", ".join(map(str, known.values()))
