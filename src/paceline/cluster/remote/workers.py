"""Keep a worker running on another machine, through a command that runs a shell there.

It copies Dask's TLS files and, until the node joined, a join token through the shell's standard
input. Then it runs `paceline worker`, which ends when that input does, and is started again.
``serve_hosts`` reaches the hosts of a profile over this machine's ``ssh``, with its keys, known
hosts and configuration; nothing but ssh and Paceline is expected there.
"""

from __future__ import annotations

import asyncio
import io
import logging
import shlex
import tarfile
from dataclasses import dataclass

from paceline.client import AccessClient
from paceline.cluster.embedded import TLS_DIRECTORY
from paceline.config import HostSettings, Runtime
from paceline.errors import PacelineError, WorkerLost
from paceline.schemas import CreateJoinToken
from paceline.text import printable

log = logging.getLogger(__name__)

TOKEN_FILE = "join-token"  # noqa: S105 - a file's name
TOKEN_TTL_S = 3600.0
PREPARE_S = 60.0
STOP_S = 15.0
BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
STEADY_S = 60.0  # a worker that ran this long resets its host's backoff


@dataclass(frozen=True, kw_only=True)
class RemoteHost:
    """A machine and the worker that runs there."""

    name: str  # in log lines
    shell: tuple[str, ...]  # argv that runs the command line appended to it in a shell there
    worker_id: str
    state: str  # its state directory, from its user's home
    program: str
    rack: str = ""
    zone: str = ""


async def keep_worker(runtime: Runtime, host: RemoteHost) -> None:
    """Run the host's worker until this is cancelled; one that ends is started again."""
    failures = 0
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        try:
            await _run_worker(runtime, host, joins=await _prepare(runtime, host))
        except (PacelineError, OSError) as error:
            log.warning("no worker on host=%s why=%s", host.name, error)
        failures = 0 if loop.time() - began > STEADY_S else failures + 1
        await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])


async def _prepare(runtime: Runtime, host: RemoteHost) -> bool:
    """Copy to ``host`` what its worker needs; return whether it has yet to join.

    Raises WorkerLost where it cannot be reached.
    """
    state = shlex.quote(host.state)
    joined = await _shell(host, f"test -f {state}/identity/identity.json && echo joined || true")
    token = b"" if b"joined" in joined else await asyncio.to_thread(_new_token, runtime, host)
    packed = _packed(runtime, token)
    await _shell(host, f"umask 077 && mkdir -p {state} && tar -xf - -C {state}", packed)
    return bool(token)


async def _run_worker(runtime: Runtime, host: RemoteHost, *, joins: bool) -> None:
    argv = [host.program, "worker", "--state", host.state, "--worker-id", host.worker_id]
    if joins:
        argv += ["--coordinator", runtime.endpoints.coordinator_url]
        argv += ["--join", f"@{host.state}/{TOKEN_FILE}"]
    argv += ["--scheduler", runtime.endpoints.scheduler_address, "--until-eof"]
    for label in ("rack", "zone"):
        if value := getattr(host, label):
            argv += [f"--{label}", value]
    process = await _start(host, f"exec {shlex.join(argv)}")
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        async for line in process.stdout:
            text = printable(line.decode(errors="replace").strip(), 500)
            log.info("%s: %s", host.worker_id, text)
        log.warning("worker ended host=%s code=%s", host.name, await process.wait())
    finally:
        process.stdin.close()  # the worker ends, and with it the connection
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def _new_token(runtime: Runtime, host: RemoteHost) -> bytes:
    client = AccessClient.of(runtime)
    try:
        call = CreateJoinToken(worker_id=host.worker_id, ttl_seconds=TOKEN_TTL_S)
        return client.create_join_token(call).token.encode()
    finally:
        client.close()


def _packed(runtime: Runtime, token: bytes) -> bytes:
    """Return an archive with Dask's TLS files and the token, readable by their owner only."""
    directory = runtime.state_dir / TLS_DIRECTORY
    files = {f"{TLS_DIRECTORY}/{each.name}": each.read_bytes() for each in directory.iterdir()}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in {**files, TOKEN_FILE: token}.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o600
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


async def _shell(host: RemoteHost, command: str, sent: bytes = b"") -> bytes:
    """Return what ``command`` printed on ``host``; raises WorkerLost."""
    process = await _start(host, command)
    try:
        out, _ = await asyncio.wait_for(process.communicate(sent), PREPARE_S)
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise WorkerLost("the host does not answer", where=host.name) from error
    if process.returncode:
        raise WorkerLost(
            "the host cannot be prepared",
            got=printable(out.decode(errors="replace").strip()[-300:], 300),
            wanted="a shell without a password, and a home that can be written",
            where=host.name,
            do=f"Try: {shlex.join([*host.shell, 'true'])}",
        )
    return out


async def _start(host: RemoteHost, command: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(*host.shell, command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


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
