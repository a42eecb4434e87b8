"""What a request on a kept connection takes, with and without TCP_NODELAY.

``python -m benchmarks.kept_connection`` serves one small answer, head and body in two writes as the
controller's are, once by uvicorn's protocol as it is and once by the controller's, from a listening
socket like the controller's. It prints the median and the slowest tenth of each.
"""

import argparse
import asyncio
import http.client
import socket
import statistics
import sys
import time

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from services.controller.api.connections import BoundedProtocol

_HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"2")]


async def _answer(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    await send({"type": "http.response.body", "body": b"{}"})


async def _timed(protocol: type[H11Protocol], requests: int) -> list[float]:
    config = uvicorn.Config(_answer, log_config=None, lifespan="off")
    listener = socket.create_server(("127.0.0.1", 0))
    server = await asyncio.get_running_loop().create_server(
        lambda: protocol(config, ServerState(), {}), sock=listener
    )
    host, port = listener.getsockname()
    async with server:
        return await asyncio.to_thread(_ask, host, port, requests)


def _ask(host: str, port: int, requests: int) -> list[float]:
    connection = http.client.HTTPConnection(host, port)
    seconds = []
    for _ in range(requests):
        began = time.perf_counter()
        connection.request("GET", "/")
        connection.getresponse().read()
        seconds.append(time.perf_counter() - began)
    connection.close()
    return seconds


def main() -> None:
    """Measure both and print them."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--requests", type=int, default=100)
    requests = options.parse_args().requests
    for name, protocol in (("uvicorn's", H11Protocol), ("controller's", BoundedProtocol)):
        seconds = sorted(asyncio.run(_timed(protocol, requests)))
        slow = seconds[int(len(seconds) * 0.9)]
        sys.stdout.write(
            f"{name:13} median {statistics.median(seconds) * 1000:6.2f} ms, "
            f"slowest tenth from {slow * 1000:6.2f} ms\n"
        )


if __name__ == "__main__":
    main()
