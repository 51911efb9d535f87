"""Bytes from every rank to every rank, on a group of their own that a thread may use.

Its collectives never meet the training's, so that a save can end while steps go on. Nothing is
pickled. The group ends with the default one: leaving it alone could wait for ever for a dead peer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.errors import PeerLost
from paceline.training.checkpoint.layout import Chunk, Held, from_bytes, to_bytes
from paceline.training.group import Group


class Exchange:
    """Made on every rank at the same time; then used by one thread of each at a time."""

    def __init__(self, group: Group, deadline_s: float) -> None:
        self._ranks = group.world_size
        self.rank = group.rank
        self._process_group = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
            if group.world_size > 1
            else None
        )

    def all(self, mine: bytes) -> list[bytes]:
        """Return what each rank gave, by rank; raises PeerLost where one is gone or too late."""
        if self._process_group is None:
            return [mine]
        try:
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._ranks)]
            size = torch.tensor([len(mine)], dtype=torch.int64)
            dist.all_gather(sizes, size, group=self._process_group)
            longest = max(int(each) for each in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8)
            if mine:
                padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self._ranks)]
            dist.all_gather(parts, padded, group=self._process_group)
        except RuntimeError as error:
            raise PeerLost("another rank is gone", got=str(error).splitlines()[0][:300]) from error
        return [
            part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)
        ]

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a contiguous tensor in host memory to rank ``to``."""
        try:
            dist.send(tensor, to, group=self._process_group)
        except RuntimeError as error:
            raise PeerLost("another rank is gone", got=str(error).splitlines()[0][:300]) from error

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fill a contiguous tensor in host memory with what rank ``source`` sends."""
        try:
            dist.recv(tensor, source, group=self._process_group)
        except RuntimeError as error:
            raise PeerLost("another rank is gone", got=str(error).splitlines()[0][:300]) from error


def agree_on_held(exchange: Exchange, mine: Sequence[Chunk]) -> Held:
    """Return what every rank holds; a list that several hold is sent by the first of them only."""
    raw = to_bytes(mine)
    digests = exchange.all(hashlib.sha256(raw).digest())
    numbers = {digest: number for number, digest in enumerate(dict.fromkeys(digests))}
    of_rank = tuple(numbers[digest] for digest in digests)
    sends = of_rank.index(of_rank[exchange.rank]) == exchange.rank
    told = exchange.all(raw if sends else b"")
    return Held(tuple(from_bytes(each) for each in told if each), of_rank)
