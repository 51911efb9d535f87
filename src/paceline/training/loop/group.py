"""The ranks as one group: joining it, and agreeing on numbers.

One process alone is a group of one and needs no torch.distributed. Numbers travel by gloo, tensors
of a GPU by NCCL; only gloo has been run. Knows nothing of models.
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
    """This rank's place among the others."""

    rank: int = 0
    world_size: int = 1

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the sum over ranks of each value."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        with _translated():
            dist.all_reduce(tensor)
        found: list[float] = tensor.tolist()
        return found

    def all(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on every rank."""
        return self.sums([0.0 if flag else 1.0])[0] == 0.0

    def from_first(self, value: int) -> int:
        """Return rank 0's ``value``."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64)
        with _translated():
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
    """Join the gang's group; each attempt has a name space of its own, so no old rank disturbs it.

    With ``serve`` rank 0 is the rendezvous; without, somebody else is (the node's launcher).
    ``own`` is the address that other ranks reach this one at: gloo listens on its interface (unless
    GLOO_SOCKET_IFNAME names another), by itself on the one that the host name leads to.
    Raises PeerLost where the others do not come within ``timeout_s``.
    """
    if world_size == 1:
        yield Group()
        return
    timeout = timedelta(seconds=timeout_s)
    if interface := interface_of(own or host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    elif own:
        log.warning("no interface here has the node's address, gloo chooses one address=%s", own)
    with _translated():
        store = TCPStore(
            host,
            port,
            world_size,
            serve and rank == 0,
            timeout,
            wait_for_workers=False,
            # torch would listen on every interface; the gang's rendezvous is nobody else's business
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
    dist.destroy_process_group()  # only after success: with a dead peer it could wait for ever


def interface_of(host: str) -> str | None:
    """Return the network interface of this machine that has the address ``host``; None: none."""
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
def _translated() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch raises DistError subclasses and bare RuntimeErrors
        raise PeerLost("another rank is gone", got=str(error).splitlines()[0][:300]) from error
