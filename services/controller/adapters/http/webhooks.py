"""Sends webhooks, and to public addresses alone unless an operator of the controller says otherwise.

A webhook's URL is chosen by whoever may submit jobs; the controller stands where the cluster's internal
services answer. So the address is looked up here, each address found must be public, and the connection
is made to that very address: a name that resolves differently a moment later leads nowhere else.
Redirects are not followed, and of an answer only its status is read and told.
"""

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterable, Mapping, Set
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import httpcore
import httpx

from services.controller.ports.webhooks import AddressRefusedError, DeliveryError

_TIMEOUTS: Final = {"connect": 5.0, "read": 15.0, "write": 15.0, "pool": 15.0}
_LOOK_UP_S: Final = 5.0
# A look-up that is given up still has its thread, for minutes where no server of names answers. All turns
# together begin three a second.
_LOOK_UPS_AT_ONCE: Final = 128
# Of one try from its beginning to the answer's head: a receiver may send that byte by byte.
_ANSWERED_WITHIN_S: Final = 20.0
# Of an answer. Informational ones may come before it, without end: 64 KiB of them take a tenth of a second
# to parse, in which the loop renews no lead.
_READ_BYTES: Final = 4_096
_LONGEST_HEAD: Final = 1 << 16
_GONE: Final = 410
_TAKEN: Final = range(200, 300)
_FAULTS: Final = (
    httpcore.NetworkError,
    httpcore.TimeoutException,
    httpcore.ProtocolError,
    httpcore.UnsupportedProtocol,
)
_PORTS: Final = {"http": 80, "https": 443}
# Public by their form, and yet they lead back: gateways to IPv4 (NAT64, and the forms before it), and what
# clouds answer their own machines under.
_LEAD_BACK: Final = tuple(
    map(
        ipaddress.ip_network,
        (
            *("64:ff9b::/96", "64:ff9b:1::/48", "::/96", "::ffff:0:0:0/96"),
            *("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32"),
            "3fff::/20",  # documentation (RFC 9637), which Python counts as public
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
        self._look_ups = 0
        # It knows no proxy of the environment, which would connect to addresses that were not looked at,
        # and follows no redirect.
        self._http = httpcore.AsyncConnectionPool(
            ssl_context=httpx.create_ssl_context(trust_env=False),
            max_connections=None,
            max_keepalive_connections=0,
            network_backend=_ShortAnswers(),
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
        if parts.port == 0:  # it would be the scheme's own
            raise AddressRefusedError(
                "a webhook's URL has no port 0; leave it out, or name another"
            )
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
        target = httpcore.URL(
            scheme=parts.raw_scheme, host=address, port=port, target=parts.raw_path
        )
        try:
            async with (
                asyncio.timeout(_ANSWERED_WITHIN_S),
                self._http.stream(
                    "POST",
                    target,
                    headers=[
                        ("Host", parts.netloc.decode("ascii")),
                        *headers.items(),
                        ("Content-Length", str(len(body))),
                    ],
                    content=body,
                    # The certificate is that of the name.
                    extensions={"sni_hostname": host, "timeout": _TIMEOUTS},
                ) as response,
            ):
                status = response.status
        except TimeoutError as error:
            raise DeliveryError(f"no answer within {_ANSWERED_WITHIN_S:g} s") from error
        except httpcore.RemoteProtocolError as error:
            # Its text has what was received.
            raise DeliveryError("the receiver did not answer in HTTP/1.1") from error
        except _FAULTS as error:
            raise DeliveryError(f"{type(error).__name__}: {error}".removesuffix(": ")) from error
        if status not in _TAKEN:
            raise DeliveryError(f"the receiver answered {status}", is_gone=status == _GONE)

    async def _address(self, host: str, port: int) -> str:
        """The address to connect to.

        Raises:
            DeliveryError: The name has none.
            AddressRefusedError: One of them is not public.
        """
        try:
            async with asyncio.timeout(_LOOK_UP_S):
                addresses = await self._looked_up(host, port)
        except TimeoutError as error:
            raise DeliveryError(
                f"no address of {host} was found within {_LOOK_UP_S:g} s"
            ) from error
        except (OSError, UnicodeError) as error:
            raise DeliveryError(f"no address of {host} was found: {error}") from error
        if host not in self._trusted:
            for address in addresses:
                _refuse_private(host, address)
        return addresses[0]

    async def _looked_up(self, host: str, port: int) -> list[str]:
        """The addresses of a name, found in a thread of its own.

        Those of the loop are for plans, archives and downloads, and are few: names whose servers do not answer
        would take them all.
        """
        if self._look_ups >= _LOOK_UPS_AT_ONCE:
            raise DeliveryError(f"{self._look_ups} names are being looked up; {host} waits")
        loop = asyncio.get_running_loop()
        found: asyncio.Future[list[str]] = loop.create_future()

        def note(addresses: list[str], error: Exception | None) -> None:
            self._look_ups -= 1
            if found.done():  # given up
                return
            if error is None:
                found.set_result(addresses)
            else:
                found.set_exception(error)

        def look_up() -> None:
            addresses, failed = [], None
            try:
                entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                addresses = [str(entry[4][0]) for entry in entries]
            except (OSError, UnicodeError) as error:
                failed = error
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(note, addresses, failed)

        self._look_ups += 1
        # Nobody waits for it when the process ends.
        threading.Thread(target=look_up, name="webhook-name", daemon=True).start()
        return await found


class _ShortAnswers(httpcore.AsyncNetworkBackend):
    """Connections from which little is read at a time, and of which no more than a long head is."""

    def __init__(self) -> None:
        self._real = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 as httpcore names it
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect, as always."""
        return _ShortAnswer(
            await self._real.connect_tcp(host, port, timeout, local_address, socket_options)
        )


class _ShortAnswer(httpcore.AsyncNetworkStream):
    """One of them."""

    def __init__(self, real: httpcore.AsyncNetworkStream) -> None:
        self._real = real
        self._read = 0

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 as httpcore names it
        """The next bytes, unless there were too many."""
        if self._read >= _LONGEST_HEAD:
            raise httpcore.RemoteProtocolError
        part = await self._real.read(min(max_bytes, _READ_BYTES), timeout)
        self._read += len(part)
        return part

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109 as httpcore names it
        """Send, as always."""
        await self._real.write(buffer, timeout)

    async def aclose(self) -> None:
        """Close, as always."""
        await self._real.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 as httpcore names it
    ) -> httpcore.AsyncNetworkStream:
        """Go on in TLS, within the same bounds."""
        return _ShortAnswer(await self._real.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:  # noqa: ANN401 as httpcore has it
        """What is known of it."""
        return self._real.get_extra_info(info)


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
