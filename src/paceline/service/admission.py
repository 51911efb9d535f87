"""How a node becomes a worker: a certificate and a token, for a join token or for the last ones.

The certificate names the worker id that the token is bound to, never one that the request chose.
The node's private key stays on the node. Nothing is handed out before its token is committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from paceline.coordinator import Coordinator
from paceline.coordinator.callers import caller
from paceline.coordinator.messages import AdmitWorker
from paceline.coordinator.tokens import draw
from paceline.errors import AccessDenied
from paceline.profile import Profile, Runtime
from paceline.relay.wires.identity import (
    Authority,
    ensure_authority,
    fingerprint,
    issue_for_request,
)
from paceline.wire.access import JoinWorker, WorkerIdentity

RENEW_AT = 2 / 3  # of its life
DAY_S = 86_400.0
SERVERS_OWN = ("control", "services", "data", "training", "evaluation", "gate", "model")


class Admission:
    """Issues identities in the name of the installation's authority."""

    def __init__(
        self,
        runtime: Runtime,
        coordinator: Coordinator,
        *,
        urls: Callable[[], tuple[str, ...]],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._runtime, self._coordinator = runtime, coordinator
        self._urls, self._wall = urls, wall

    def ca_pem(self) -> bytes:
        """Return the authority's certificate; it is made where there is none yet."""
        return self._authority().cert.read_bytes()

    def ca_sha256(self) -> str:
        """Return the authority's fingerprint; it is made where there is none yet."""
        return fingerprint(self.ca_pem())

    def admit(self, asked: JoinWorker) -> WorkerIdentity:
        """Return the caller's next identity; a join token is spent by it.

        Raises AccessDenied where the caller's token is not bound to that worker, InvalidInput for
        a request that is none.
        """
        who = caller()
        if who.worker_id != asked.worker_id:
            raise AccessDenied(
                "the token is not that worker's",
                got=asked.worker_id,
                wanted=who.worker_id or "a token that is bound to a worker",
                do="Make a join token for this worker: `paceline tokens join --worker-id ID`.",
            )
        authority, now = self._authority(), self._wall()
        days = self._runtime.profile.security.identity_days
        certificate = issue_for_request(
            authority, asked.worker_id, asked.csr.encode(), valid_days=days
        )
        token, expires_at = draw(), now + days * DAY_S
        self._coordinator.handle(
            AdmitWorker(
                spends=who.token_id,
                worker_id=asked.worker_id,
                token_id=token.token_id,
                sha256=token.sha256,
                expires_at=expires_at,
                at=now,
            )
        )
        return WorkerIdentity(
            worker_id=asked.worker_id,
            certificate=certificate.decode(),
            ca=authority.cert.read_bytes().decode(),
            certificate_expires_at=expires_at,
            token=token.text,
            token_expires_at=expires_at,
            renew_at=now + days * DAY_S * RENEW_AT,
            peer_token=self._runtime.secrets.for_peers,
            rest_ca=self._rest_ca(),
            coordinator_urls=self._urls(),
            profile=_for_nodes(self._runtime.profile),
        )

    def _rest_ca(self) -> str | None:
        """Return what this port's certificate is checked against, where not by the system's CAs."""
        security = self._runtime.profile.security
        if security.rest_tls == "installation":
            return self.ca_pem().decode()
        if security.rest_tls == "files" and security.rest_ca:
            return (self._runtime.state_dir / security.rest_ca).read_text(encoding="ascii")
        return None

    def _authority(self) -> Authority:
        return ensure_authority(self._directory())

    def _directory(self) -> Path:
        return self._runtime.state_dir / self._runtime.profile.security.authority


def _for_nodes(profile: Profile) -> dict[str, object]:
    """Return what an agent needs of ``profile``: not the servers' part, nor how they train."""
    return profile.model_dump(mode="json", exclude=set(SERVERS_OWN))
