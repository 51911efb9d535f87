"""torch.distributed with gloo: tensors broadcast from rank 0, hashed and written by every other."""

from __future__ import annotations

import hashlib
import os
import sys

from benchmarks.cpu.stage import Nodes, Order, delivery, hear, say

BLOCK = 16 * 1024 * 1024  # 64 MiB cost as much, 4 MiB a third more


def conduct(order: Order, block: int = BLOCK) -> None:
    """Run a rank a receiver and one for the source."""
    with Nodes() as nodes:
        for rank in range(order.receivers + 1):
            nodes.start("benchmarks.cpu.gloo", rank, block)
            nodes.tell(rank, order.text())
        for rank in range(len(nodes)):
            nodes.hear(rank)
        copies = [order.copy(f"node-{rank}") for rank in range(1, len(nodes))]
        with delivery(copies, order.sha256):
            for rank in range(len(nodes)):
                nodes.tell(rank, "go")
            for rank in range(len(nodes)):
                nodes.hear(rank)


def run(rank: int, block: int) -> None:
    """Be one rank."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    order = Order.parse(hear())
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{order.scratch}/rendezvous",
        rank=rank,
        world_size=order.receivers + 1,
    )
    buffer = torch.zeros(block, dtype=torch.uint8)
    distributed.broadcast(buffer, 0)  # connections are there
    path = order.source if rank == 0 else order.copy(f"node-{rank}")
    descriptor = os.open(path, os.O_RDONLY if rank == 0 else os.O_WRONLY | os.O_CREAT, 0o644)
    digest = hashlib.sha256()
    say(ready=True)
    hear()
    for at in range(0, order.size, block):
        part = buffer[: min(block, order.size - at)]
        view = memoryview(part.numpy())
        if rank == 0:
            os.preadv(descriptor, [view], at)
        distributed.broadcast(part, 0)
        if rank:
            digest.update(view)
            os.pwrite(descriptor, view, at)
    if rank and digest.hexdigest() != order.sha256:
        raise RuntimeError("corrupt")
    say(finished=True)
    hear()


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]))
