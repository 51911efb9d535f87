"""The management network: hosts reach the coordinator's loopback port through unlimited pipes.

A coordinator without TLS listens on loopback only, and a namespace's loopback is its own. So one
process in the core listens on the same loopback port *inside each host's namespace* and passes
bytes on; heartbeats then take nothing from the links that are measured.

    python management.py PORT OUTSIDE NAMESPACE… (paths such as /run/netns/x; run in the core)

Once every port is open it prints the one by which the coordinator is reached from OUTSIDE, the
owner's namespace. A socket belongs to the namespace that it was made in.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import sys
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def enter(namespace: Path) -> None:
    """Have this thread's new sockets be made in ``namespace``."""
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(namespace))
    finally:
        os.close(descriptor)


def listeners(port: int, outside: Path, namespaces: list[Path]) -> list[socket.socket]:
    """Return sockets that listen on loopback: on a free port in ``outside`` (the first), and on
    ``port`` in each of ``namespaces``.
    """
    home = Path("/proc/thread-self/ns/net")
    own = os.open(home, os.O_RDONLY)
    opened = []
    try:
        for each, number in [(outside, 0), *((each, port) for each in namespaces)]:
            enter(each)
            opened.append(socket.create_server(("127.0.0.1", number), backlog=64))
    finally:
        if _libc.setns(own, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "cannot return to the core's namespace")
        os.close(own)
    return opened


async def forward(port: int, sockets: list[socket.socket]) -> None:
    """Pass bytes between the listening ``sockets`` and loopback ``port`` here, for ever."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # the other side is told by the close below
        finally:
            writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:
            writer.close()
            return
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    servers = [await asyncio.start_server(connected, sock=each) for each in sockets]
    sys.stdout.write(f"{sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.gather(*(each.serve_forever() for each in servers))


if __name__ == "__main__":
    number, places = int(sys.argv[1]), [Path(each) for each in sys.argv[2:]]
    asyncio.run(forward(number, listeners(number, places[0], places[1:])))
