"""Dask: blocks scattered to every worker (broadcast), hashed and written by a task on each."""

from __future__ import annotations

import hashlib
import os

from benchmarks.cpu.stage import Order, delivery

BLOCK = 64 * 1024 * 1024


def conduct(order: Order) -> None:
    """Run a cluster of one process a receiver."""
    from dask import config
    from distributed import Client, LocalCluster

    config.set({"distributed.worker.memory.terminate": False})
    with (
        LocalCluster(
            n_workers=order.receivers,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            local_directory=str(order.scratch),
            memory_limit=0,
        ) as cluster,
        Client(cluster) as client,
    ):
        workers = list(client.scheduler_info(n_workers=-1)["workers"])
        copies = [order.copy(f"node-{number}") for number in range(len(workers))]
        places = dict(zip(workers, copies, strict=True))
        client.run(os.getpid)  # imports and connections are there
        with delivery(copies, order.sha256), order.source.open("rb") as source:
            for at in range(0, order.size, BLOCK):
                data = source.read(BLOCK)
                wanted = hashlib.sha256(data).hexdigest()
                (scattered,) = client.scatter([data], broadcast=True, hash=False)
                keeping = [
                    client.submit(
                        keep,
                        scattered,
                        str(copy),
                        at,
                        wanted,
                        workers=[worker],
                        allow_other_workers=False,
                        pure=False,
                    )
                    for worker, copy in places.items()
                ]
                client.gather(keeping)
                del scattered, keeping


def keep(data: bytes, path: str, at: int, wanted: str) -> None:
    """Verify and write a block; on the worker."""
    if hashlib.sha256(data).hexdigest() != wanted:
        raise RuntimeError("corrupt block")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(descriptor, data, at)
    finally:
        os.close(descriptor)
