"""Process group of the ranks: join it, reduce and broadcast numbers.

A single process is a group of one and needs no torch.distributed. Scalars use gloo, GPU tensors
use NCCL, which has not been run between ranks. Does not depend on models.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from paceline.errors import PeerLost

log = logging.getLogger(__name__)

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


@dataclass(frozen=True)
class Group:
    """This rank's number and the world size, with collectives over scalars."""

    rank: int = 0
    world_size: int = 1

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all ranks."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        with as_peer_lost():
            dist.all_reduce(tensor)
        found: list[float] = tensor.tolist()
        return found

    def all(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on every rank."""
        return self.sums([0.0 if flag else 1.0])[0] == 0.0

    def from_rank0(self, value: int) -> int:
        """Return rank 0's ``value``."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64)
        with as_peer_lost():
            dist.broadcast(tensor, src=0)
        return int(tensor[0])


@contextlib.contextmanager
def join_group(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    attempt: int,
    timeout_s: float,
    *,
    serve: bool = True,
    own: str = "",
) -> Iterator[Group]:
    """Join the gang's process group; each attempt has its own key prefix, so old ranks cannot join.

    With ``serve`` rank 0 hosts the rendezvous store; without, a node's launcher does. ``own`` is
    the address at which other ranks reach this one: gloo listens on its interface, unless
    GLOO_SOCKET_IFNAME names another (gloo's default is the interface of the host name).
    Raises PeerLost where the others do not join within ``timeout_s``.
    """
    if world_size == 1:
        yield Group()
        return
    timeout = timedelta(seconds=timeout_s)
    if interface := interface_of(own or host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    elif own:
        log.warning("no interface here has the node's address, gloo chooses one address=%s", own)
    with as_peer_lost():
        store = TCPStore(
            host,
            port,
            world_size,
            serve and rank == 0,
            timeout,
            wait_for_workers=False,
            # by default torch listens on every interface
            master_listen_fd=_listen(host, port) if serve and rank == 0 else None,
        )
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=PrefixStore(f"attempt-{attempt}", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    yield Group(rank, world_size)
    dist.destroy_process_group()  # only after success: with a dead peer it can block forever


def interface_of(host: str) -> str | None:
    """Return this machine's network interface with the address ``host``; None where none has it."""
    try:
        address = socket.inet_aton(socket.gethostbyname(host))
    except OSError:  # no such name, or IPv6
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode())
                if fcntl.ioctl(asked, _SIOCGIFADDR, request)[20:24] == address:
                    return name
    return None


def _listen(host: str, port: int) -> int:
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the launcher holds it reserved
    server.bind((host, port))
    server.listen(1024)
    return server.detach()


@contextlib.contextmanager
def as_peer_lost() -> Iterator[None]:
    """Translate errors of collectives: raises PeerLost."""
    try:
        yield
    except RuntimeError as error:  # torch raises DistError subclasses and bare RuntimeErrors
        raise PeerLost("another rank is gone", got=str(error).splitlines()[0][:300]) from error
