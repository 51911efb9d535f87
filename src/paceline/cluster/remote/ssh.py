"""Workers on the hosts of a profile, over this machine's ``ssh``: `[cluster] kind = "ssh"`.

Its keys, known hosts and configuration are used. Nothing but ssh and Paceline is expected there.
"""

from __future__ import annotations

import asyncio

from paceline.cluster.remote.workers import RemoteHost, keep_worker
from paceline.config import HostSettings, Runtime

SSH = (
    *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)


async def serve_hosts(runtime: Runtime, stop: asyncio.Event) -> None:
    """Run a worker on each host of the profile until ``stop``; one that ends is started again."""
    keeping = [
        asyncio.create_task(keep_worker(runtime, _host(each)))
        for each in runtime.profile.cluster.hosts
    ]
    await stop.wait()
    for task in keeping:
        task.cancel()
    await asyncio.gather(*keeping, return_exceptions=True)


def _host(settings: HostSettings) -> RemoteHost:
    shell = (*SSH, "--", settings.ssh)
    return RemoteHost(name=settings.ssh, shell=shell, **settings.model_dump(exclude={"ssh"}))
