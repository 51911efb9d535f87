"""Opens the stores that a profile's [control] names; client libraries are imported on demand."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from paceline.config import Runtime, named_secret
from paceline.coordinator.stores.audit import Audit, PostgresAudit, SqliteAudit
from paceline.coordinator.stores.coordination import Coordination
from paceline.coordinator.stores.progress import MemoryProgress, Progress, RedisProgress
from paceline.coordinator.stores.sqlite import SqliteCoordination
from paceline.errors import InvalidProfile

FILE = "coordinator.sqlite"  # in the state directory
AUDIT_FILE = "audit.sqlite"  # where coordination is not SQLite


def open_coordination(runtime: Runtime) -> Coordination:
    """Return the coordination store; raises InvalidProfile, AccessDenied, ServiceUnavailable."""
    control = runtime.profile.control
    if control.coordination == "sqlite":
        if control.replicas > 1:
            raise InvalidProfile(
                "several replicas need a store that they can share",
                got=f'control.replicas = {control.replicas}, control.coordination = "sqlite"',
                wanted='control.coordination = "etcd" and control.etcd_endpoints',
            )
        return SqliteCoordination(runtime.state_dir / FILE)
    if not control.etcd_endpoints:
        raise _missing("etcd_endpoints", '["http://HOST:PORT", …]')
    if bool(control.etcd_cert) != bool(control.etcd_key):
        raise _missing("etcd_key" if control.etcd_cert else "etcd_cert", "both or neither")
    from paceline.coordinator.stores.etcd import EtcdAccess, EtcdCoordination

    variable = control.etcd_password_env
    access = EtcdAccess(
        endpoints=control.etcd_endpoints,
        ca=_pem(runtime, "etcd_ca", control.etcd_ca),
        cert=_pem(runtime, "etcd_cert", control.etcd_cert),
        key=_pem(runtime, "etcd_key", control.etcd_key),
        user=control.etcd_user,
        password=named_secret(variable, "control.etcd_user") if control.etcd_user else "",
    )
    return EtcdCoordination(access, control.etcd_prefix, lease_s=control.lease_s)


def open_progress(runtime: Runtime) -> Progress:
    """Return the progress store; raises InvalidProfile. An unavailable Redis is no error."""
    control = runtime.profile.control
    if control.progress == "memory":
        return MemoryProgress()
    url = _url("redis_url", control.redis_url, ("redis", "rediss", "unix"), "redis://HOST:PORT/0")
    return RedisProgress(
        url,
        prefix=control.redis_prefix,
        user=control.redis_user,
        password=named_secret(control.redis_password_env),
        ca=_path(runtime, "redis_ca", control.redis_ca),
    )


def open_audit(runtime: Runtime) -> Audit:
    """Return the audit store; SQLite's tables are created at once.

    Raises InvalidProfile; ServiceUnavailable where SQLite's file cannot be used. PostgreSQL is
    connected and migrated on first use.
    """
    control = runtime.profile.control
    if control.audit == "sqlite":
        beside = control.coordination == "sqlite"
        return SqliteAudit(runtime.state_dir / (FILE if beside else AUDIT_FILE))
    form = "postgresql://USER@HOST:PORT/DATABASE"
    url = _url("postgres_url", control.postgres_url, ("postgresql", "postgres"), form)
    return PostgresAudit(url, password=named_secret(control.postgres_password_env))


def _url(name: str, url: str, schemes: tuple[str, ...], form: str) -> str:
    if not url:
        raise _missing(name, form)
    try:
        parts = urlsplit(url)
        known, password = parts.scheme in schemes, parts.password
    except ValueError:
        known, password = False, None
    if password is not None:
        raise InvalidProfile(
            "a profile carries no passwords",
            got=f"control.{name} with a password in it",
            wanted=f"{form}, and the password in the variable named by control.…_password_env",
        )
    if not known:
        raise InvalidProfile("no such URL", got=f"control.{name} = {url!r}", wanted=form)
    return url


def _path(runtime: Runtime, name: str, value: str) -> Path | None:
    if not value:
        return None
    path = runtime.state_dir / value
    if not path.is_file():
        raise InvalidProfile(
            "no such file", got=f"control.{name} = {value!r}", wanted="a PEM file", where=path
        )
    return path


def _pem(runtime: Runtime, name: str, value: str) -> bytes | None:
    path = _path(runtime, name, value)
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise InvalidProfile(
            "a PEM file cannot be read", got=error, wanted=f"control.{name}", where=path
        ) from error


def _missing(name: str, wanted: str) -> InvalidProfile:
    return InvalidProfile(
        "a setting of the state stores is missing",
        got=f"no control.{name}",
        wanted=wanted,
        do="Add it to the profile's [control].",
    )
