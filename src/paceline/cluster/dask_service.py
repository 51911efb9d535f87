"""Dask's processes: a scheduler, and per node a nanny with one worker process.

``serve`` is the cluster of a profile: a scheduler, and as ``kind`` says all nodes on this machine
(the embedded installation), a worker on each host over SSH (ssh.py), or none. A node of its own
machine runs ``serve_nodes`` (`paceline worker`). Dask only places and watches processes: workers
carry the names and resources of nodes. All connections use TLS with the installation's own
certificates, because a scheduler runs any client's code.

Scheduler and nannies are driven directly rather than through SpecCluster, which drops a node for
good when its worker is missing for ``lost-worker-timeout``; here a lost worker is always restarted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.cluster.addresses import CONTROL_THREADS, labels_of, node_names
from paceline.cluster.agents import WANTED_FILE
from paceline.cluster.embedded import CLUSTER_FILE, TLS_DIRECTORY, port_of
from paceline.cluster.remote import serve_allocation, serve_hosts, serve_job_allocations
from paceline.config import Runtime, ThisNode, load_runtime, read_certificate
from paceline.errors import NotReady, ServiceUnavailable
from paceline.system import write_private
from paceline.text import log_to_stderr

log = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 6.0
# Kinds whose nodes have no resident agent: it comes and goes with the node's worker.
OWN_AGENTS = ("local", "ssh", "slurm")
WATCH_S = 1.0


def dask_settings() -> dict[str, Any]:
    """Return the Dask configuration that a fleet needs, for scheduler, workers and clients."""
    return {
        # the worker reports its machine and restarts its agent
        "distributed.worker.preload": ["paceline.cluster.agents"],
        "distributed.worker.daemon": False,  # ranks are children of workers
        "distributed.worker.multiprocessing-method": "spawn",
        "distributed.scheduler.allowed-failures": 0,  # a pinned task must fail with its worker
        "distributed.scheduler.no-workers-timeout": "20s",  # else it stays pending silently
        "distributed.scheduler.worker-ttl": "60s",
        "distributed.scheduler.work-stealing": False,  # everything here is pinned
        "distributed.scheduler.active-memory-manager.start": False,
        "distributed.worker.profile.enabled": False,
        "distributed.worker.memory.monitor-interval": "1s",
        "distributed.admin.tick.interval": "1s",  # of each of nine servers, and 20 ms by default
        "distributed.admin.system-monitor.interval": "5s",
        "distributed.admin.event-loop": "asyncio",
        "distributed.comm.timeouts.connect": "10s",
        "distributed.comm.retry.count": 1,
        "distributed.diagnostics.nvml": False,
    }


def security_of(runtime: Runtime) -> Any:
    """Return the TLS settings with which scheduler, workers and clients authenticate.

    One certificate for all of them, in ``<state>/dask-tls`` where the secrets name none. Raises
    NotReady where it is missing.
    """
    from distributed.security import Security

    secrets, files = runtime.secrets, runtime.state_dir / TLS_DIRECTORY
    ca = secrets.tls_ca or str(files / "ca.pem")
    cert = secrets.tls_cert or str(files / "server.pem")
    key = secrets.tls_key or str(files / "server-key.pem")
    if missing := [each for each in (ca, cert, key) if not Path(each).is_file()]:
        raise NotReady(
            "Dask's TLS files are not here",
            got="no such file",
            wanted="the three that `paceline init --scheduler` made",
            where=missing[0],
            do=f"Copy the directory {TLS_DIRECTORY} of the state directory that it made.",
        )
    authority = read_certificate(ca).decode()  # Dask takes PEM text in place of a path
    roles = {
        f"tls_{role}_{part}": path
        for role in ("scheduler", "worker", "client")
        for part, path in (("cert", cert), ("key", key))
    }
    return Security(require_encryption=True, tls_ca_file=authority, **roles)


async def serve(runtime: Runtime) -> None:
    """Run the cluster of a profile until SIGTERM or SIGINT: a scheduler here, and its nodes.

    The nodes are here (``local``), on hosts over SSH, or started by others (``address``).
    """
    from distributed import Scheduler
    from distributed.comm import get_address_host

    address = runtime.endpoints.scheduler_address
    scheduler = Scheduler(
        host=get_address_host(address),
        port=port_of(address),
        protocol="tls",
        security=security_of(runtime),
        dashboard=False,
        http_prefix="",
    )
    try:
        await scheduler
    except (OSError, RuntimeError) as error:
        raise ServiceUnavailable(
            "the scheduler cannot listen", got=error.__cause__ or error, where=address
        ) from error
    try:
        if runtime.profile.cluster.kind == "local":
            await _serve_local(runtime)
        else:
            log.info("scheduler ready address=%s", scheduler.address)
            serving = serve_hosts
            if runtime.profile.cluster.kind == "slurm":
                per_job = runtime.profile.cluster.slurm.per_job
                serving = serve_job_allocations if per_job else serve_allocation
            await serving(runtime, stop_event())
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await scheduler.close(reason="installation stops")


async def _serve_local(runtime: Runtime) -> None:
    ready_file = runtime.state_dir / "dask" / CLUSTER_FILE
    ready_file.unlink(missing_ok=True)
    address = runtime.endpoints.scheduler_address
    nodes = [
        ThisNode(
            worker_id=each,
            state_dir=runtime.state_dir,
            labels=labels_of(runtime.profile, each).model_dump(exclude_defaults=True),
        )
        for each in node_names(runtime.profile)
    ]

    def ready() -> None:
        names = [each.worker_id for each in nodes]
        write_private(ready_file, json.dumps({"address": address, "nodes": names}).encode())
        log.info("cluster ready nodes=%d address=%s", len(names), address)

    try:
        await serve_nodes(runtime, nodes, runtime.profile.services.host, ready)
    finally:
        ready_file.unlink(missing_ok=True)


def stop_event(*, at_eof: bool = False) -> asyncio.Event:
    """Return an event that SIGTERM, SIGINT and, with ``at_eof``, the end of standard input set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if at_eof:

        def read() -> None:
            if not os.read(0, 4096):
                loop.remove_reader(0)
                stop.set()

        loop.add_reader(0, read)
    return stop


async def serve_nodes(
    runtime: Runtime,
    nodes: Sequence[ThisNode],
    host: str = "",
    on_ready: Callable[[], None] = lambda: None,
    *,
    until_eof: bool = False,
) -> None:
    """Run the workers of ``nodes`` here, each under a nanny, until ``stop_event``.

    They listen at ``host`` ("": the address on the way to the scheduler). A nanny that gives up, or
    whose scheduler is away, is replaced. Raises ServiceUnavailable where a first start fails.
    """
    from distributed import Nanny
    from distributed.comm import get_address_host
    from distributed.utils import get_ip

    address = runtime.endpoints.scheduler_address
    host = host or get_ip(get_address_host(address))  # a worker without one listens everywhere
    security = security_of(runtime)
    stop = stop_event(at_eof=until_eof)

    named = {each.worker_id: each for each in nodes}

    async def start_node(worker_id: str) -> Any:
        return await Nanny(address, **_node_options(runtime, named[worker_id], security, host))

    try:
        started = await asyncio.gather(*map(start_node, named))
    except (OSError, RuntimeError, TimeoutError) as error:
        raise ServiceUnavailable(
            "the worker cannot register with Dask's scheduler",
            got=error.__cause__ or error,
            wanted="a scheduler with the same TLS files",
            where=address,
            do="Start the scheduler first; it must take connections from this machine.",
        ) from error
    nannies = dict(zip(named, started, strict=True))
    on_ready()
    try:
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), WATCH_S)
            if not stop.is_set():
                await _replace_dead(nannies, start_node)
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                closing = [each.close(timeout=2, reason="node stops") for each in nannies.values()]
                await asyncio.gather(*closing, return_exceptions=True)


async def _replace_dead(nannies: dict[str, Any], start_node: Any) -> None:
    # A nanny restarts its worker itself; it stops doing so when a start fails, or when the
    # scheduler ended.
    for worker_id, nanny in list(nannies.items()):
        if nanny.status.name in ("closed", "failed") or (
            nanny.status.name == "running"
            and nanny.process is not None
            and nanny.process.status.name == "failed"
        ):
            log.warning("node's nanny gave up, starting another worker=%s", worker_id)
            with contextlib.suppress(Exception):
                await nanny.close(timeout=1)
            try:
                nannies[worker_id] = await asyncio.wait_for(start_node(worker_id), 30)
            except Exception as error:  # noqa: BLE001 - whatever it is, the next try may work
                log.warning("node is not started, trying again worker=%s why=%r", worker_id, error)


def _node_options(runtime: Runtime, node: ThisNode, security: Any, host: str) -> dict[str, Any]:
    cluster = runtime.profile.cluster
    has_agent = cluster.kind in OWN_AGENTS and bool(runtime.endpoints.coordinator_url)
    node = replace(node, own_agent=has_agent)
    directory = node.directory / "dask"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    (node.directory / WANTED_FILE).unlink(missing_ok=True)  # from an earlier start
    return {
        "name": node.worker_id,
        "env": node.environment(),
        # Paceline's own calls wait for processes. They get extra threads, so that a node whose
        # other threads are all busy still answers.
        "nthreads": cluster.threads_per_node + CONTROL_THREADS,
        "resources": {"slot": cluster.threads_per_node},
        "memory_limit": cluster.node_memory_mb * 1_000_000 or None,
        "local_directory": str(directory),
        "host": host,
        "protocol": "tls",
        "security": security,
        "dashboard": False,
        "death_timeout": runtime.profile.services.ready_timeout_s,  # imports take long under load
    }


def run(serving: Coroutine[Any, Any, None]) -> None:
    """Run ``serve`` or ``serve_nodes`` in a process of its own, with its logs on standard error."""
    import dask

    dask.config.set(dask_settings())
    import distributed  # noqa: F401 - it sets the level of its logger

    log_to_stderr(logging.INFO, "%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("distributed").setLevel(logging.WARNING)
    asyncio.run(serving)


def main() -> int:
    """Run the service named on the command line."""
    parser = argparse.ArgumentParser(prog="paceline.cluster.dask_service")
    parser.add_argument("--state", required=True, type=Path)
    run(serve(load_runtime(parser.parse_args().state)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
