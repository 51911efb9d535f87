"""REST routes for tokens, joining the fleet, the audit history, and the table of purposes.

A node becomes a worker when it receives a certificate and a token, in exchange for a join token or
for its current certificate and token. The certificate carries the worker id that the token is bound
to, not an id that the request chose. The node's private key stays on the node. The response is sent
only after the new token is committed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Path as PathParameter, Query, Response

from paceline.api.middleware import Authenticator
from paceline.api.problems import PROBLEM
from paceline.api.routes import PURPOSES
from paceline.config import Runtime, read_certificate
from paceline.coordinator import (
    Coordinator,
    CoordinatorState,
    current_call,
    current_caller,
    member_id,
    new_token,
)
from paceline.coordinator.state import AdmitWorker, IssueToken, RevokeToken
from paceline.coordinator.stores import EventQuery
from paceline.errors import (
    AccessDenied,
    Conflict,
    InvalidInput,
    NotFound,
    ServiceUnavailable,
    StorageFailed,
)
from paceline.relay import endorse, trusted_set
from paceline.relay.transport import (
    Authority,
    authorities,
    ensure_authority,
    fingerprint,
    issue_for_key,
    key_sha256,
    requested_key,
)
from paceline.schemas import (
    RULE_ID,
    AllowPurpose,
    CreatedToken,
    CreateJoinToken,
    CreateToken,
    EventList,
    EventName,
    JoinWorker,
    Name,
    PurposeList,
    PurposeRule,
    Scope,
    Success,
    TokenList,
    TokenView,
    WorkerIdentity,
    digest_of,
    require_no_secrets,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

log = logging.getLogger(__name__)

AUTHORITIES_S = 2.0  # how often the authority's directory is looked at for the next heartbeat
RENEW_AT = 2 / 3  # share of an identity's lifetime after which a worker renews it
DAY_S = 86_400.0
# Sections of a profile that agents do not need.
SERVER_SECTIONS = {"control", "services", "data", "training", "evaluation", "gate", "model"}


class IdentityIssuer:
    """Issues worker identities signed by the installation's certificate authority."""

    def __init__(
        self,
        runtime: Runtime,
        coordinator: Coordinator,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._runtime, self._coordinator, self._wall = runtime, coordinator, wall
        self._trusted: str | None = None
        self._looked_s = -math.inf

    def ca_pem(self) -> bytes:
        """Return the authority's certificate (PEM); create the authority if there is none yet.

        Raises ServiceUnavailable if it cannot be read.
        """
        with _unavailable_on_file_error():
            return read_certificate(self._authority().cert)

    def ca_sha256(self) -> str:
        """Return the SHA-256 fingerprint of the authority's certificate."""
        return fingerprint(self.ca_pem())

    def rest_ca_sha256(self) -> str | None:
        """Return the fingerprint of the authority that signed the REST port's certificate, if it is
        the installation's own.
        """
        own = self._runtime.profile.security.rest_tls == "installation"
        return self.ca_sha256() if own else None

    def is_outdated(self) -> bool:
        """Return whether the caller's identity came with other authorities than those of now."""
        call = current_call.get()
        if call is None or call.caller is None or call.caller.worker_id is None:
            return False
        if (now_s := time.monotonic()) > self._looked_s + AUTHORITIES_S:
            self._looked_s = now_s
            try:
                self._trusted = trusted_set(self._directory)
            except (InvalidInput, OSError) as error:  # it is being copied: looked at again
                log.warning("the installation's own files: %s", error)
        return call.caller.authority != self._trusted

    def admit(self, asked: JoinWorker) -> WorkerIdentity:
        """Return the caller's next identity; this spends a join token for the request's key.

        Raises AccessDenied if the caller's token is not bound to that worker, was spent for
        another key or is for other networks, or if it is a group join token without uses left, or
        for a name that is not new; Conflict if a living worker has that id, InvalidInput if the
        certificate request is malformed, ServiceUnavailable if this installation's own files cannot
        be read.
        """
        who, call = current_caller(), current_call.get()
        by_group = who.worker_id is None and Scope.JOIN in who.scopes
        if who.worker_id != asked.worker_id and not by_group:
            raise AccessDenied(
                "the token is not that worker's",
                got=asked.worker_id,
                wanted=who.worker_id or "a token that is bound to a worker",
                do="Make a join token for this worker: `paceline tokens join --worker-id ID`.",
            )
        if not by_group:  # the registry of tokens has a stricter rule for these
            self._require_free(who.token_id, asked.worker_id)
        known = self._runtime.endpoints
        key, now = requested_key(asked.csr.encode()), self._wall()
        key_digest, admission = key_sha256(key), who.admission
        if by_group:
            admission = member_id(who.token_id, asked.worker_id, key_digest)
        days = self._runtime.profile.security.identity_days
        certificates, trusted = self._sign(asked.worker_id, key, days, admission)
        token, expires_at = new_token(), now + days * DAY_S
        self._coordinator.handle(
            AdmitWorker(
                spends=who.token_id,
                worker_id=asked.worker_id,
                token_id=token.token_id,
                sha256=token.sha256,
                expires_at=expires_at,
                key_sha256=key_digest,
                authority=trusted,
                address=call.address if call else "",
                at=now,
            )
        )
        return WorkerIdentity(
            worker_id=asked.worker_id,
            **certificates,
            certificate_expires_at=expires_at,
            token=token.text,
            token_expires_at=expires_at,
            renew_at=now + days * DAY_S * RENEW_AT,
            peer_token=self._runtime.secrets.peers_token,
            coordinator_urls=known.coordinator_urls or tuple(filter(None, [known.coordinator_url])),
            profile=self._runtime.profile.model_dump(mode="json", exclude=SERVER_SECTIONS),
        )

    def _sign(
        self, worker_id: str, key: EllipticCurvePublicKey, days: float, admission: str
    ) -> tuple[dict[str, Any], str | None]:
        """Return the certificates of a WorkerIdentity by its fields' names, and the authorities
        that it trusts; raises ServiceUnavailable where the installation's files cannot be read.
        """
        with _unavailable_on_file_error():
            authority, rest_ca = self._authority(), self._rest_ca()
            ca, other = read_certificate(authority.cert), authorities(self._directory)[1]
            other_ca = read_certificate(other.cert) if other else None
            both = (endorse(ca, other), endorse(other_ca, authority)) if other and other_ca else ()
            certificate = issue_for_key(
                authority, worker_id, key, valid_days=days, admission=admission
            )
            fields = {
                "certificate": certificate.decode(),
                "ca": ca.decode(),
                "rest_ca": rest_ca,
                "other_ca": other_ca.decode() if other_ca else None,
                "endorsements": both,
            }
            return fields, trusted_set(self._directory)

    def _require_free(self, token_id: str, worker_id: str) -> None:
        """Raise Conflict if this first use of a join token would end a living worker's identity."""

        def is_taken(state: CoordinatorState) -> bool:
            shown = state.tokens.find(token_id)
            joins = shown is not None and shown.kind == "join" and shown.used_at is None
            return (
                joins
                and state.fleet.alive(worker_id)
                and state.tokens.is_in_use(worker_id, self._wall())
            )

        if self._coordinator.read(is_taken):
            raise Conflict(
                "another host is this worker, and alive",
                got=worker_id,
                wanted="a name of its own for each host",
                do=f"Join under another --worker-id. If this host replaces it: `paceline tokens "
                f"revoke --worker-id {worker_id}`, then join with a new token.",
            )

    def _rest_ca(self) -> str | None:
        """Return the CA (PEM) of the REST certificate; None: plain, or the system's CAs."""
        security = self._runtime.profile.security
        if security.rest_tls == "installation":
            return self.ca_pem().decode()
        if security.rest_tls == "files" and security.rest_ca:
            return read_certificate(self._runtime.state_dir / security.rest_ca).decode()
        return None

    @property
    def _directory(self) -> Path:
        return self._runtime.state_dir / self._runtime.profile.security.authority

    def _authority(self) -> Authority:
        return ensure_authority(self._directory)


@contextlib.contextmanager
def _unavailable_on_file_error() -> Iterator[None]:
    """Translate an error in this installation's own files into ServiceUnavailable.

    The file's name goes to the log only, because callers without a token reach this code too.
    """
    try:
        yield
    except (InvalidInput, StorageFailed) as error:
        log.warning("the installation's own files: %s", error)
        raise ServiceUnavailable(
            f"the coordinator's own files: {error.what}", do="Call again; its log says which."
        ) from error


MOST_ROWS = 1000
Seconds = Annotated[float | None, Query(ge=0, le=1e11, allow_inf_nan=False)]
Number = Annotated[int | None, Query(ge=0, le=2**62)]


def make_access_router(
    coordinator: Coordinator, admission: IdentityIssuer, authenticator: Authenticator
) -> APIRouter:
    """Return the routes for tokens, joining and the audit history."""
    router = APIRouter(responses=PROBLEM)

    _add_tokens(router, coordinator, admission, authenticator)
    _add_history(router, coordinator)

    @router.post("/workers/join", tags=["access"])
    def join_worker(call: JoinWorker) -> WorkerIdentity:
        """Spend a join token and return a worker's certificate and token.

        The call may be repeated with the same key until the join token expires.
        """
        return admission.admit(call)

    @router.post("/workers/renew", tags=["access"])
    def renew_worker(call: JoinWorker) -> WorkerIdentity:
        """Return a worker's next token and certificate, before the current ones expire."""
        return admission.admit(call)

    @router.get("/ca.pem", tags=["access"], response_class=Response)
    def get_authority() -> Response:
        """Return the authority's certificate, which is public."""
        return Response(admission.ca_pem(), media_type="application/x-pem-file")

    return router


def _add_tokens(
    router: APIRouter,
    coordinator: Coordinator,
    admission: IdentityIssuer,
    authenticator: Authenticator,
) -> None:
    def issue(call: CreateToken | CreateJoinToken, ca_sha256: str | None) -> CreatedToken:
        # A join token carries the fingerprint; of others callers get it beside the token.
        drawn = new_token(ca_sha256 if isinstance(call, CreateJoinToken) else None)
        event = IssueToken(
            token_id=drawn.token_id, sha256=drawn.sha256, call=call, at=coordinator.now()
        )
        record = coordinator.handle(event)
        assert isinstance(record, TokenView)
        return CreatedToken(token=drawn.text, record=record, ca_sha256=ca_sha256)

    @router.post("/tokens", status_code=201, tags=["access"])
    def create_token(call: CreateToken) -> CreatedToken:
        """Create a bearer token; only this response contains the secret."""
        return issue(call, admission.rest_ca_sha256())

    @router.post("/tokens/join", status_code=201, tags=["access"])
    def create_join_token(call: CreateJoinToken) -> CreatedToken:
        """Create a join token, with which one agent may join once, or as many as ``nodes``."""
        return issue(call, admission.ca_sha256())

    @router.get("/tokens", tags=["access"])
    def list_tokens() -> TokenList:
        """List every stored token, including those that are no longer valid."""
        seen = authenticator.seen
        tokens = coordinator.read(lambda state: state.tokens.tokens())
        return TokenList(tokens=tuple(TokenView.of(e, seen.get(e.token_id)) for e in tokens))

    @router.delete("/tokens/{token_id}", tags=["access"])
    def revoke_token(token_id: Annotated[Name, PathParameter()]) -> Success:
        """Revoke a token; it is refused from the next call on.

        Revoking a worker's token revokes every token of that worker; revoking a spent join token
        revokes the identity that was issued for it; revoking a group join token ends its uses, and
        nodes that joined with it keep their identities.
        """
        answer = coordinator.handle(RevokeToken(token_id=token_id, at=coordinator.now()))
        assert isinstance(answer, Success)
        return answer


def _add_history(router: APIRouter, coordinator: Coordinator) -> None:
    @router.get("/audit", tags=["access"])
    def get_audit(
        after: Number = 0,
        before: Number = None,
        limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = 100,
        newest_first: bool = False,
        name: Annotated[list[EventName] | None, Query(max_length=50)] = None,
        deployment_id: Annotated[str | None, Query(max_length=128)] = None,
        worker_id: Annotated[Name | None, Query()] = None,
        since: Seconds = None,
        until: Seconds = None,
    ) -> EventList:
        """Return the audit history: events, changes with caller and address, and refused calls."""
        asked = EventQuery(
            after=after or 0,
            before=before,
            limit=limit,
            newest_first=newest_first,
            names=tuple(name or ()),
            deployment_id=deployment_id,
            worker_id=worker_id,
            since=since,
            until=until,
        )
        rows = coordinator.history(asked)
        return EventList(events=tuple(rows), last=max((e.seq for e in rows), default=after or 0))


MOST_RULES = 1000
RuleId = Annotated[str, PathParameter(pattern=RULE_ID)]


def make_purpose_router(coordinator: Coordinator) -> APIRouter:
    """Return the routes for the table of what data may be used for."""
    router = APIRouter(responses=PROBLEM, tags=["access"])

    @router.get(PURPOSES)
    def list_purposes() -> PurposeList:
        """List every rule, oldest first, those that ended included."""
        return PurposeList(rules=tuple(coordinator.purposes()))

    @router.post(PURPOSES, status_code=201)
    def allow_purpose(call: AllowPurpose) -> PurposeRule:
        """Allow data to be used for a purpose; the same again renews the rule."""
        require_no_secrets(call)
        at, rules = coordinator.now(), coordinator.purposes()
        what = {name: getattr(call, name) for name in ("purpose", "data", "teams", "projects")}
        rule = PurposeRule(
            rule_id=f"dp-{digest_of(what)[:12]}",
            **what,
            reason=call.reason,
            approver=current_caller().name,
            allowed_at=at,
            expires_at=None if call.ttl_seconds is None else at + call.ttl_seconds,
        )
        others = [each for each in rules if each.rule_id != rule.rule_id]
        dropped = [each.rule_id for each in others if not each.is_in_force(at)]
        excess = len(others) + 1 - MOST_RULES
        if excess > len(dropped):
            raise Conflict(
                "there are too many rules in force",
                got=len(others),
                wanted=f"fewer than {MOST_RULES}",
                do="Revoke some: `paceline purposes revoke`.",
            )
        return coordinator.save_purpose(rule, dropped[: max(0, excess)])

    @router.delete(f"{PURPOSES}/{{rule_id}}")
    def revoke_purpose(rule_id: RuleId) -> PurposeRule:
        """End a rule: jobs that rest on it are refused when they begin, and at promotion."""
        known = {each.rule_id: each for each in coordinator.purposes()}
        if (rule := known.get(rule_id)) is None:
            raise NotFound("no such rule", got=rule_id, do="See `paceline purposes list`.")
        if rule.revoked_at is not None:
            return rule
        ended = {"revoked_at": coordinator.now(), "revoked_by": current_caller().name}
        return coordinator.save_purpose(rule.model_copy(update=ended))

    return router
