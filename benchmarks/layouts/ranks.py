"""Ranks that are forked once and go through one job after another, small gangs first."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEADLINE_S = 1800.0
GROUP_TIMEOUT_S = 301.0  # for ranks that wait while rank 0 does the single runs, or is silent


@dataclass(frozen=True)
class Job:
    """Something that ``ranks`` ranks do together; rank 0's answer counts.

    Jobs of as many ranks share their group. ``around`` is entered on each rank meanwhile.
    """

    name: str
    ranks: int
    run: Callable[[], object]
    around: Callable[[], AbstractContextManager[object]] = nullcontext


def run_jobs(jobs: Sequence[Job], deadline_s: float = DEADLINE_S) -> list[dict[str, Any]]:
    """Fork as many ranks as the largest job needs, run all jobs, and return what rank 0 answered.

    Jobs of fewer ranks come first: what DTensor keeps of a mesh serves the next job of its group. A
    job that raises stops the ranks: RuntimeError with the first traceback.
    """
    jobs = sorted(jobs, key=lambda job: job.ranks)
    for name in ("torch.distributed.tensor.parallel", "torch.distributed.pipelining", "sympy"):
        importlib.import_module(name)  # once, not in each rank
    ranks = max(job.ranks for job in jobs)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        port = _free_port()
        children = [
            context.Process(target=_be_rank, args=(rank, port, jobs, out)) for rank in range(ranks)
        ]
        for child in children:
            child.start()
        deadline = time.monotonic() + deadline_s
        try:
            while any(child.is_alive() for child in children):
                failed = any(child.exitcode not in (None, 0) for child in children)
                if failed or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        finally:
            for child in children:
                child.kill()
                child.join()
        codes = [child.exitcode for child in children]
        if any(codes):
            why = sorted(out.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
            raise RuntimeError(why[0].read_text() if why else f"ranks ended with {codes}")
        return [json.loads(line) for line in (out / "answers").read_text().splitlines()]


def _be_rank(rank: int, port: int, jobs: Sequence[Job], out: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False)
    joined = 1  # ranks of the group that is open
    for number, job in enumerate(jobs):
        if rank >= job.ranks:
            continue
        started = time.perf_counter()
        try:
            if job.ranks > joined:
                if joined > 1:
                    dist.destroy_process_group()
                    _forget_groups()
                joined = job.ranks
                dist.init_process_group(
                    "gloo",
                    store=dist.PrefixStore(f"job-{number}", store),
                    rank=rank,
                    world_size=joined,
                    timeout=timedelta(seconds=GROUP_TIMEOUT_S),
                )
            with job.around():
                answer = job.run()
            if joined > 1:
                dist.barrier()
        except BaseException:
            (out / f"error-{rank}").write_text(f"{job.name}: {traceback.format_exc()}")
            raise
        if rank == 0:
            seconds = time.perf_counter() - started
            with (out / "answers").open("a") as file:
                file.write(json.dumps({"job": job.name, "answer": answer, "s": seconds}) + "\n")
    # Rank 0 serves the store: it leaves last.
    store.set(f"done-{rank}", "1")
    if rank == 0:
        for other in range(max(job.ranks for job in jobs)):
            store.wait([f"done-{other}"])


def _forget_groups() -> None:
    """Drop what DTensor keeps for each mesh: an equal mesh's later groups have other names.

    A rank of a training job opens one mesh in its life.
    """
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
