"""How the coordinator's port is protected: by loopback, or by TLS under names that callers check.

Nothing listens beyond loopback without TLS unless the profile says aloud that tokens may cross the
network in the clear; what is missing is named, each key of it.
"""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InvalidProfile
from paceline.profile import Runtime
from paceline.relay.wires.identity import ensure_authority, issue_server
from paceline.service.limits import LOOPBACK_NAMES
from paceline.system.addresses import is_loopback

SERVER_DAYS = 825.0  # a new certificate at each start
SERVER_DIRECTORY = "tls/coordinator"


@dataclass(frozen=True, slots=True)
class Protection:
    """``tls`` is None where the port is plain; ``names`` are what callers may call it."""

    tls: ssl.SSLContext | None
    names: tuple[str, ...]

    @property
    def scheme(self) -> str:
        """Return what its URLs begin with."""
        return "https" if self.tls else "http"


def protection_of(runtime: Runtime, host: str) -> Protection:
    """Return how to serve on ``host``.

    Raises InvalidProfile naming every setting that is missing for that, before anything listens.
    """
    _require_settings(runtime, host)
    security = runtime.profile.security
    names = names_of(runtime, host)
    if security.rest_tls in ("off", "plaintext-anywhere"):
        return Protection(None, names)
    if security.rest_tls == "files":
        cert, key = (runtime.state_dir / each for each in (security.rest_cert, security.rest_key))
    else:
        authority = ensure_authority(runtime.state_dir / security.authority)
        directory = runtime.state_dir / SERVER_DIRECTORY
        hosts = (*LOOPBACK_NAMES, *names)
        cert, key = issue_server(authority, hosts, directory, valid_days=SERVER_DAYS)
    return Protection(_context(cert, key), names)


def names_of(runtime: Runtime, host: str) -> tuple[str, ...]:
    """Return the names beside loopback's that the Host header may carry."""
    own = () if not host or _is_wildcard(host) else (host,)
    return (*own, *runtime.profile.security.rest_hosts)


def _require_settings(runtime: Runtime, host: str) -> None:
    security = runtime.profile.security
    beyond = not is_loopback(host)
    missing = []
    if not runtime.secrets.coordinator_token:
        missing.append("a coordinator_token in secrets.json (`paceline up` makes one)")
    if beyond and security.rest_tls == "off":
        missing.append(
            '[security] rest_tls = "installation" (or "files" with rest_cert and rest_key)'
        )
    if beyond and (not host or _is_wildcard(host)) and not security.rest_hosts:
        missing.append('[security] rest_hosts = ["the names and addresses callers use"]')
    if security.rest_tls == "files":
        missing += [
            f'[security] {key} = "FILE.pem"'
            for key in ("rest_cert", "rest_key")
            if not getattr(security, key)
        ]
    if missing:
        raise InvalidProfile(
            "the coordinator may not listen there without authentication and TLS"
            if beyond
            else "the coordinator's port is not protected as the profile says",
            got=f'host {host or "(any)"}, [security] rest_tls = "{security.rest_tls}"',
            wanted="; ".join(missing),
            where=f"profile {runtime.profile.name}",
            do="Add what is wanted; or, where everybody on that network may read tokens, set "
            '[security] rest_tls = "plaintext-anywhere".',
        )


def _context(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidProfile(
            "the coordinator's certificate cannot be used",
            got=error,
            wanted="a certificate and its key, as PEM",
            where=f"{cert}, {key}",
            do="Correct [security] rest_cert and rest_key.",
        ) from error
    return context


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
