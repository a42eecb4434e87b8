"""Sends webhooks, and to public addresses alone unless an operator of the controller says otherwise.

A webhook's URL is chosen by whoever may submit jobs; the controller stands where the cluster's internal
services answer. So the address is looked up here, each address found must be public, and the connection
is made to that very address: a name that resolves differently a moment later leads nowhere else.
Redirects are not followed, and of an answer only its status is told.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Mapping, Set
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

import httpx

from services.controller.ports.webhooks import AddressRefusedError, DeliveryError

_TIMEOUT: Final = httpx.Timeout(15.0, connect=5.0)
_LOOK_UP_S: Final = 5.0
# Of one try from its beginning to the answer's head: a receiver may send that byte by byte.
_ANSWERED_WITHIN_S: Final = 20.0
_GONE: Final = 410
_PORTS: Final = {"http": 80, "https": 443}
# Public by their form, and yet they lead back: gateways to IPv4 (NAT64, and the forms before it), and what
# clouds answer their own machines under.
_LEAD_BACK: Final = tuple(
    map(
        ipaddress.ip_network,
        (
            *("64:ff9b::/96", "64:ff9b:1::/48", "::/96", "::ffff:0:0:0/96"),
            *("192.0.0.0/24", "168.63.129.16/32"),
        ),
    )
)
# Addresses beyond it are for networks of their own (`fec0::/10`, overlays that took 200::/7) or have no use yet;
# ``is_global`` knows them by what they are not.
_PUBLIC_IPV6: Final = ipaddress.ip_network("2000::/3")
_IPV6: Final = 6


class HttpWebhooks:
    """The port ``WebhookSender``.

    Args:
        trusted: Host names and addresses that may be anywhere, and be spoken to without TLS.
    """

    def __init__(self, trusted: Set[str] = frozenset()) -> None:
        self._trusted = trusted
        # No proxy of the environment: it would connect to addresses that were not looked at.
        self._http = httpx.AsyncClient(
            timeout=_TIMEOUT,
            follow_redirects=False,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def __aenter__(self) -> Self:
        """The sender itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close its connections."""
        await self._http.aclose()

    def check(self, url: str) -> None:
        """See ``WebhookSender.check``."""
        parts = urlsplit(url)
        host = parts.hostname
        if parts.scheme not in _PORTS or not host:
            raise AddressRefusedError("a webhook's URL begins with https:// and names a host")
        if parts.username is not None or parts.password is not None:
            raise AddressRefusedError("a webhook's URL has no user name; what is sent is signed")
        if host in self._trusted:
            return
        if parts.scheme != "https":
            raise AddressRefusedError(
                f"webhooks go to {host} over https alone; an operator allows http by "
                "MESHLOOM_WEBHOOK_HOSTS of the controller"
            )
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return  # a name: looked up whenever something is sent
        _refuse_private(host, str(address))

    async def send(self, url: str, headers: Mapping[str, str], body: bytes) -> None:
        """See ``WebhookSender.send``."""
        self.check(url)
        parts = httpx.URL(url)
        # As it travels: not every name that does has a form in letters for people.
        host = parts.raw_host.decode("ascii")
        port = parts.port or _PORTS[parts.scheme]
        address = await self._address(host, port)
        try:
            async with (
                asyncio.timeout(_ANSWERED_WITHIN_S),
                self._http.stream(
                    "POST",
                    parts.copy_with(host=address),
                    headers={**headers, "Host": parts.netloc.decode("ascii")},
                    content=body,
                    # The certificate is that of the name.
                    extensions={"sni_hostname": host},
                ) as response,
            ):
                status = response.status_code
        except TimeoutError as error:
            raise DeliveryError(f"no answer within {_ANSWERED_WITHIN_S:g} s") from error
        except httpx.HTTPError as error:
            raise DeliveryError(f"{type(error).__name__}: {error}") from error
        if not response.is_success:
            raise DeliveryError(f"the receiver answered {status}", is_gone=status == _GONE)

    async def _address(self, host: str, port: int) -> str:
        """The address to connect to.

        Raises:
            DeliveryError: The name has none.
            AddressRefusedError: One of them is not public.
        """
        try:
            async with asyncio.timeout(_LOOK_UP_S):
                found = await asyncio.get_running_loop().getaddrinfo(
                    host, port, type=socket.SOCK_STREAM
                )
        except (OSError, TimeoutError, UnicodeError) as error:
            raise DeliveryError(f"no address of {host} was found: {error}") from error
        addresses = [str(entry[4][0]) for entry in found]
        if host not in self._trusted:
            for address in addresses:
                _refuse_private(host, address)
        return addresses[0]


def _refuse_private(host: str, address: str) -> None:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None) or getattr(parsed, "sixtofour", None)
    leads_back = any(parsed in network for network in _LEAD_BACK)
    is_public = parsed.is_global and not parsed.is_multicast and not leads_back
    if parsed.version == _IPV6 and parsed not in _PUBLIC_IPV6:
        is_public = False
    if not is_public or (mapped is not None and not mapped.is_global):
        raise AddressRefusedError(
            f"{host} is not a public address; an operator allows it by MESHLOOM_WEBHOOK_HOSTS of "
            "the controller"
        )
