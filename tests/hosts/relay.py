"""Relays a listening socket to a port of the namespace in which it runs: ``relay.py DESCRIPTOR HOST PORT``.

The socket was made outside, so that a test reaches a host's port by loopback.
"""

import asyncio
import socket
import sys


async def main() -> None:
    descriptor, host, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_reader, to_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pump(reader, to_writer), _pump(to_reader, writer))

    listener = socket.socket(fileno=descriptor)
    async with await asyncio.start_server(relay, sock=listener) as server:
        await server.serve_forever()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


if __name__ == "__main__":
    asyncio.run(main())
