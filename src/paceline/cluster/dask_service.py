"""The Dask service of an installation: a scheduler, and per node a nanny with one worker process.

Run as ``python -m paceline.cluster.dask_service --state DIR``. Dask only places and watches
processes: workers carry the names, directories and resources of nodes. All connections use TLS with
the installation's own certificates, because a scheduler runs any client's code.

Scheduler and nannies are driven directly rather than through SpecCluster, which drops a node for
good when its worker is missing for ``lost-worker-timeout``; here a lost worker is always restarted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import signal
from pathlib import Path
from typing import Any

from paceline.cluster.addresses import CONTROL_THREADS, node_names
from paceline.cluster.agents import WANTED_FILE
from paceline.cluster.embedded import CLUSTER_FILE, port_of
from paceline.config import Runtime, load_runtime, read_certificate
from paceline.system import write_private
from paceline.text import log_to_stderr

log = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 6.0
WATCH_S = 1.0


def dask_settings() -> dict[str, Any]:
    """Return the Dask configuration that a fleet needs, for scheduler, workers and clients."""
    return {
        # a new worker restarts its agent
        "distributed.worker.preload": ["paceline.cluster.agents"],
        "distributed.worker.daemon": False,  # ranks are children of workers
        "distributed.worker.multiprocessing-method": "spawn",
        "distributed.scheduler.allowed-failures": 0,  # a pinned task must fail with its worker
        "distributed.scheduler.no-workers-timeout": "20s",  # else it stays pending silently
        "distributed.scheduler.worker-ttl": "60s",
        "distributed.scheduler.work-stealing": False,  # everything here is pinned
        "distributed.scheduler.active-memory-manager.start": False,
        "distributed.worker.profile.enabled": False,
        "distributed.admin.event-loop": "asyncio",
        "distributed.comm.timeouts.connect": "10s",
        "distributed.comm.retry.count": 1,
        "distributed.diagnostics.nvml": False,
    }


def security_of(runtime: Runtime) -> Any:
    """Return the TLS settings with which scheduler, workers and clients authenticate."""
    from distributed.security import Security

    secrets = runtime.secrets
    pair = {"cert": secrets.tls_cert, "key": secrets.tls_key}
    roles = {
        f"tls_{role}_{part}": path
        for role in ("scheduler", "worker", "client")
        for part, path in pair.items()
    }
    authority = read_certificate(secrets.tls_ca).decode()  # Dask takes PEM text in place of a path
    return Security(require_encryption=True, tls_ca_file=authority, **roles)


async def serve(runtime: Runtime) -> None:
    """Run scheduler and nodes until SIGTERM or SIGINT."""
    import dask

    dask.config.set(dask_settings())
    from distributed import Nanny, Scheduler

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    security = security_of(runtime)
    host = runtime.profile.services.host
    ready_file = runtime.state_dir / "dask" / CLUSTER_FILE
    ready_file.unlink(missing_ok=True)

    async def start_node(worker_id: str) -> Any:
        return await Nanny(
            runtime.endpoints.scheduler_address, **_node_options(runtime, worker_id, security)
        )

    port = port_of(runtime.endpoints.scheduler_address)
    scheduler = Scheduler(
        host=host, port=port, protocol="tls", security=security, dashboard=False, http_prefix=""
    )
    await scheduler
    names = node_names(runtime.profile)
    nannies = dict(zip(names, await asyncio.gather(*map(start_node, names)), strict=True))
    _write_ready(ready_file, scheduler.address, names)
    log.info("cluster ready nodes=%d address=%s", len(names), scheduler.address)
    try:
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), WATCH_S)
            if not stop.is_set():
                await _replace_dead(nannies, start_node)
    finally:
        ready_file.unlink(missing_ok=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_DEADLINE_S):
                await asyncio.gather(
                    *(
                        each.close(timeout=2, reason="installation stops")
                        for each in nannies.values()
                    ),
                    return_exceptions=True,
                )
                await scheduler.close(reason="installation stops")


async def _replace_dead(nannies: dict[str, Any], start_node: Any) -> None:
    # A nanny restarts its worker itself; it stops doing so only when a start fails.
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
            except Exception:
                log.exception("node cannot be started, trying again worker=%s", worker_id)


def _node_options(runtime: Runtime, worker_id: str, security: Any) -> dict[str, Any]:
    cluster = runtime.profile.cluster
    directory = runtime.node_dir(worker_id) / "dask"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    (runtime.node_dir(worker_id) / WANTED_FILE).unlink(missing_ok=True)  # from an earlier start
    return {
        "name": worker_id,
        # Paceline's own calls wait for processes. They get extra threads, so that a node whose
        # other threads are all busy still answers.
        "nthreads": cluster.threads_per_node + CONTROL_THREADS,
        "resources": {
            "node": 1,
            "rank": cluster.threads_per_node,
            "slot": cluster.threads_per_node,
        },
        "memory_limit": cluster.node_memory_mb * 1_000_000 or None,
        "local_directory": str(directory),
        "host": runtime.profile.services.host,
        "protocol": "tls",
        "security": security,
        "dashboard": False,
        "death_timeout": runtime.profile.services.ready_timeout_s,  # imports take long under load
    }


def _write_ready(path: Path, address: str, names: list[str]) -> None:
    write_private(path, json.dumps({"address": address, "nodes": names}).encode())


def main() -> int:
    """Run the service named on the command line."""
    parser = argparse.ArgumentParser(prog="paceline.cluster.dask_service")
    parser.add_argument("--state", required=True, type=Path)
    runtime = load_runtime(parser.parse_args().state)
    log_to_stderr(logging.INFO, "%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("distributed").setLevel(logging.WARNING)
    asyncio.run(serve(runtime))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
