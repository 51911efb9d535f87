"""The checks of `paceline doctor`: each returns what it found, and what mends it.

A check never raises: what it meets is its finding. Which of them run where is in ``command``.
"""

from __future__ import annotations

import contextlib
import email.utils
import functools
import json
import platform
import resource
import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import ParamSpec
from urllib.parse import urlsplit

from paceline import __version__
from paceline.client import CoordinatorClient
from paceline.config import (
    Runtime,
    mlflow_headers,
    mlflow_server,
    object_access,
    prefect_headers,
    prefect_server,
    read_certificate,
)
from paceline.errors import PacelineError
from paceline.extras import installed_extras
from paceline.relay import measure_disk
from paceline.schemas import Check
from paceline.system import (
    Endpoint,
    HttpServer,
    gpus,
    interface_mbit,
    interface_to,
    is_loopback,
)
from paceline.units import size

P = ParamSpec("P")
TIMEOUT_S = 5.0
OFF_S, FAR_OFF_S = 5.0, 60.0  # of the clock: tokens and certificates compare times
OPEN_FILES = 4096
SOON_S = 14 * 86_400.0
RANGE_BYTES = 4 * 1024 * 1024
ROOM_BYTES = 10e9


def ok(name: str, found: object) -> Check:
    """Return a finding that needs nothing."""
    return Check(name=name, status="ok", found=str(found))


def warning(name: str, found: object, do: str) -> Check:
    """Return a finding that works, but not as it should."""
    return Check(name=name, status="warning", found=str(found), do=do)


def failed(name: str, found: object, do: str) -> Check:
    """Return a finding that keeps something from working."""
    return Check(name=name, status="failed", found=str(found), do=do)


def guarded(
    name: str,
) -> Callable[[Callable[P, Iterator[Check]]], Callable[P, Iterator[Check]]]:
    """Make the error that ends a check its last finding, under ``name``."""

    def wrap(check: Callable[P, Iterator[Check]]) -> Callable[P, Iterator[Check]]:
        @functools.wraps(check)
        def run(*args: P.args, **kwargs: P.kwargs) -> Iterator[Check]:
            try:
                yield from check(*args, **kwargs)
            except PacelineError as error:
                found = error.as_kind(PacelineError, do=None)
                yield failed(name, found.one_line(), error.do or "")
            except (OSError, ValueError) as error:
                yield failed(name, error, "See whether the file, the disk or the server is there.")

        return run

    return wrap


@guarded("versions")
def versions() -> Iterator[Check]:
    """Paceline, Python, the system, the extras that are installed, and the limit of open files."""
    extras = ", ".join(installed_extras()) or "none"
    yield ok(
        "versions",
        f"Paceline {__version__}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.release()}, {platform.machine()}; extras: {extras}",
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < OPEN_FILES:
        do = f"Raise the hard limit to {OPEN_FILES} or more (LimitNOFILE=, ulimit -Hn)."
        yield warning("open-files", f"at most {hard}", do)


@guarded("coordinator")
def coordinator(runtime: Runtime, url: str, *, token: bool = True) -> Iterator[Check]:
    """One replica: that it answers, its certificate, its clock, and (``token``) what ours opens."""
    endpoint, ca = Endpoint.of(url), runtime.coordinator_ca
    client = CoordinatorClient(url, runtime.secrets.coordinator_token or "none", TIMEOUT_S, ca=ca)
    began = time.time()
    date = client.date()
    took = time.time() - began
    yield ok("coordinator", f"{url} answers in {took * 1000:.0f} ms")
    if endpoint.secure:
        do = "Restart it: it makes itself a certificate (or renew [security] rest_cert)."
        yield _expiry("coordinator-tls", _server_expires_at(endpoint), do)
    yield _clock(date, (began + time.time()) / 2)
    if not token:
        return
    answer = client.installation()
    if answer.version != __version__:
        do = "Install the same version here; one version apart works while you upgrade."
        yield warning("coordinator-version", f"{answer.version} there, {__version__} here", do)
    scopes = ", ".join(answer.token_scopes)
    found = f"{answer.token_name}: {scopes}"
    ends, do = answer.token_expires_at, "Have an admin make another: `paceline tokens create`."
    if ends is not None and ends - time.time() < SOON_S:
        yield warning("token", f"{found}; it ends {_day(ends)}", do)
    else:
        yield ok("token", f"{found}; {f'until {_day(ends)}' if ends else 'without end'}")


def _clock(date: str, now: float) -> Check:
    try:
        theirs = email.utils.parsedate_to_datetime(date).timestamp()
    except ValueError:
        return warning("clock", "the coordinator sends no Date", "Check what proxies its port.")
    off = now - theirs - 0.5  # Date has whole seconds
    if abs(off) <= OFF_S:
        return ok("clock", "as the coordinator's, within seconds")
    said = f"{abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} the coordinator's"
    do = "Let one time service set both clocks (chrony, systemd-timesyncd)."
    return failed("clock", said, do) if abs(off) > FAR_OFF_S else warning("clock", said, do)


def _server_expires_at(endpoint: Endpoint) -> float:
    from cryptography import x509

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # only reads it: it was verified before
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    address = (endpoint.host, endpoint.port)
    with (
        socket.create_connection(address, TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=endpoint.host) as server,
    ):
        der = server.getpeercert(binary_form=True)
    assert der is not None
    return x509.load_der_x509_certificate(der).not_valid_after_utc.timestamp()


def _expiry(name: str, ends: float, do: str) -> Check:
    left = ends - time.time()
    if left <= 0:
        return failed(name, f"expired {_day(ends)}", do)
    if left < SOON_S:
        return warning(name, f"expires {_day(ends)}", do)
    return ok(name, f"good until {_day(ends)}")


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")


@guarded("certificates")
def certificates(paths: dict[str, Path]) -> Iterator[Check]:
    """When the PEM certificates at ``paths`` (by name) expire."""
    from cryptography import x509

    for name, path in paths.items():
        if not path.is_file():
            continue
        pem = path.read_bytes() if name == "identity" else read_certificate(path)
        ends = x509.load_pem_x509_certificates(pem)[0].not_valid_after_utc.timestamp()
        do = {
            "identity": "The agent renews it while it runs; else join again with a new token.",
            "authority": "Make a new authority and have the nodes join again.",
        }.get(name, "Renew it.")
        yield _expiry(f"{name}-tls", ends, do)


@guarded("s3")
def s3(runtime: Runtime, source: str = "") -> Iterator[Check]:
    """A real ranged read of what is published, with this process's own credentials."""
    from paceline.storage import ObjectStore

    if runtime.endpoints.s3_url == "" and not runtime.is_login:
        yield ok("s3", "none: this installation keeps models on its machine's disk")
        return
    store = ObjectStore(
        object_access(runtime.profile) if runtime.is_login else runtime.object_access
    )
    place = source or runtime.models_url
    found = store.list(source) if source else []
    for _ in range(3):  # MODEL, VERSION, and a directory of files at most
        if source or not (names := store.directories(place)):
            break
        place = f"{place}/{names[-1]}"
    found = found or (store.list(place) if source or place != runtime.models_url else [])
    if not found:
        do = "Publish a model, or name where one lies: `paceline doctor --source s3://…`."
        yield warning("s3", f"{place} answers; there is nothing to read yet", do)
        return
    largest = max(found, key=lambda each: each.size)
    view = memoryview(bytearray(min(RANGE_BYTES, largest.size)))
    began = time.monotonic()
    store.read_range_into(largest.url, 0, view, etag=largest.etag, size=largest.size)
    rate = len(view) / max(time.monotonic() - began, 1e-6)
    yield ok("s3", f"read {size(len(view))} of {largest.url} at {size(rate)}/s")


@guarded("network")
def network(runtime: Runtime, url: str) -> Iterator[Check]:
    """The interface on the route to the coordinator, and its speed beside what plans count on."""
    host = urlsplit(url).hostname or ""
    if is_loopback(host):
        return
    name = interface_to(host)
    mbit = interface_mbit(name) if name else None
    if name is None or mbit is None:
        yield ok("network", f"{name or 'the interface'} to {host} reports no speed")
        return
    planned = runtime.profile.cluster.link_mbit
    if mbit < planned:
        do = "Check cable and switch, or say the real rate: `paceline agent --link-mbit`."
        yield warning("network", f"{name} has {mbit:g} Mbit/s, plans count on {planned:g}", do)
    else:
        yield ok("network", f"{name} has {mbit:g} Mbit/s")


@guarded("disk")
def disk(directory: Path, link_mbit: float) -> Iterator[Check]:
    """Free space, and the speed of a synced write, beside what the link brings."""
    free = shutil.disk_usage(directory).free
    if free < ROOM_BYTES:
        yield warning("disk-space", f"{size(free)} free at {directory}", "Free some, or move it.")
    rate = measure_disk(directory)
    said = f"writes {size(rate)}/s, {size(free)} free at {directory}"
    if rate < link_mbit * 1e6 / 8:
        do = "A model arrives no faster than it is written: use a faster disk for --state."
        yield warning("disk", f"{said}; the link brings {size(link_mbit * 1e6 / 8)}/s", do)
    else:
        yield ok("disk", said)


@guarded("gpus")
def accelerators() -> Iterator[Check]:
    """The NVIDIA GPUs, and whether their driver answers."""
    found = gpus()
    if found is None:
        do = "Look at `nvidia-smi` and `dmesg`; in a container, pass the driver in."
        yield failed("gpus", "there is a GPU, and its driver does not answer", do)
    elif len({each.split(",")[0] for each in found}) > 1:
        do = "Move the others to another node to use them in trainings."
        yield warning(
            "gpus", f"ranks use those of the kind that most are of: {'; '.join(found)}", do
        )
    else:
        yield ok("gpus", "; ".join(found) or "none")


@guarded("stores")
def stores(runtime: Runtime) -> Iterator[Check]:
    """The coordinator's three stores."""
    from paceline.coordinator.stores import EventQuery, open_audit, open_coordination, open_progress

    control = runtime.profile.control
    if control.coordination == "sqlite" or control.audit == "sqlite":
        path = runtime.state_dir / "coordinator.sqlite"
        if path.exists():
            import sqlite3

            opened = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=TIMEOUT_S)
            with contextlib.closing(opened) as database:
                tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            yield ok("store-sqlite", f"{path}: {size(path.stat().st_size)}, {tables} tables")
        else:
            yield warning("store-sqlite", f"no {path}", "Start the coordinator once.")
    if control.coordination == "etcd":
        coordination = open_coordination(runtime)
        try:
            yield ok("store-etcd", f"revision {coordination.revision()}")
        finally:
            coordination.close()
    if control.progress == "redis":
        yield from _redis(runtime, open_progress)
    if control.audit == "postgres":
        audit = open_audit(runtime)
        try:
            audit.query(EventQuery(limit=1))
            yield ok("store-postgres", "answers")
        finally:
            audit.close()


def _redis(runtime: Runtime, open_progress: Callable[[Runtime], object]) -> Iterator[Check]:
    parts = urlsplit(runtime.profile.control.redis_url)
    if parts.hostname:
        yield from server("store-redis", parts.hostname, parts.port or 6379, "Start Redis.")
    open_progress(runtime)  # raises for settings that are wrong


@guarded("servers")
def server(name: str, host: str, port: int, do: str) -> Iterator[Check]:
    """Whether something listens at ``host:port``."""
    try:
        with socket.create_connection((host, port), TIMEOUT_S):
            yield ok(name, f"{host}:{port} accepts connections")
    except OSError as error:
        yield failed(name, f"{host}:{port}: {error}", do)


@guarded("peer-port")
def peer_ports(state_dir: Path) -> Iterator[Check]:
    """Whether the agents that run here accept connections at the address that peers are given."""
    for path in sorted(state_dir.glob("nodes/*/agent.json")):
        host, _, port = str(json.loads(path.read_bytes())["address"]).rpartition(":")
        do = "Look at agent.log beside it; behind NAT --advertise HOST, a firewall must let it in."
        yield from server("peer-port", host.strip("[]"), int(port), do)


@guarded("http")
def http_server(
    name: str, called: HttpServer, path: str, headers: Mapping[str, str], do: str
) -> Iterator[Check]:
    """Whether a server answers ``path`` with 2xx."""
    url = called.endpoint.url
    try:
        answer = called.call("GET", path, headers=headers, timeout_s=TIMEOUT_S)
    except PacelineError as error:
        yield failed(name, f"{url}: {error.got}", do)
        return
    finally:
        called.close()
    if answer.status < 300:
        yield ok(name, f"{url} answers")
    else:
        why = "Check the user and password, or the key." if answer.status in (401, 403) else do
        yield failed(name, f"{url}{path}: HTTP {answer.status}", why)


@guarded("gate")
def gate(runtime: Runtime) -> Iterator[Check]:
    """Whether an operator names the snapshots that decide on promotions."""
    settings = runtime.profile.gate
    models = {f"gate.models.{name}": own for name, own in settings.models.items()}
    if runtime.endpoints.mlflow_url and (
        open_ := [name for name, own in {"gate": settings, **models}.items() if not own.judged_on]
    ):
        yield warning(
            "gate",
            f"{', '.join(open_)}: judged_on is not set, so that who submits a model's first "
            "champion, other than for a team, chooses the data that judge it and those after it",
            "Name the snapshots with held-out data, or where they lie, in gate.judged_on.",
        )


@guarded("services")
def flows_and_cluster(runtime: Runtime) -> Iterator[Check]:
    """Prefect with its deployments, MLflow, and Dask's scheduler, where they are named; and what
    the installation here starts again and again."""
    from paceline import cluster

    for each in cluster.status(runtime.state_dir).services:
        if each.state in ("restarting", "failed"):
            yield failed(each.name, f"{each.state}: {each.problem}", f"Read {each.log}.")
    endpoints = runtime.endpoints
    if api := endpoints.prefect_api_url:
        do = "Start Prefect's server; 404: register the flows, `python -m paceline.flows.register`."
        own = prefect_headers(runtime.secrets.prefect_auth)
        yield from http_server("prefect", prefect_server(api), "/work_pools/paceline", own, do)
    if endpoints.mlflow_url:
        do = "Start MLflow's server; `paceline status` shows the embedded one."
        own = mlflow_headers(runtime.secrets.mlflow_auth)
        yield from http_server("mlflow", mlflow_server(endpoints.mlflow_url), "/health", own, do)
    if endpoints.scheduler_address:
        parts = urlsplit(endpoints.scheduler_address)
        do = "Start the scheduler; `paceline status` shows the embedded one."
        yield from server("dask", parts.hostname or "", parts.port or 8786, do)
