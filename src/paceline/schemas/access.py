"""Records of tokens, joining and the audit history, and their REST calls.

A token is ``pl_<token_id>_<secret>``: the id is public, the secret is 256 random bits. Only the
SHA-256 of the whole token is stored, which is enough for a secret of that size. A join token is
spent once, for a certificate and a token that are bound to one worker id; a group join token once
for each of its nodes.
"""

from __future__ import annotations

from enum import StrEnum
from ipaddress import ip_network
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from paceline.schemas.base import Name, Record, Sha256, Text, is_empty, is_none
from paceline.schemas.events import Event

Pem = Annotated[str, StringConstraints(min_length=1, max_length=16_384)]


RULE_ID = r"^dp-[0-9a-f]{12}$"
Team = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
ProjectName = Annotated[Text, Field(min_length=1, max_length=100)]


# An IPv4 or IPv6 network as CIDR; an address alone is the network of that address.
Cidr = Annotated[str, Field(max_length=64), AfterValidator(lambda text: str(ip_network(text)))]
Networks = Annotated[tuple[Cidr, ...], Field(max_length=32)]


class Scope(StrEnum):
    """What a token allows. Admin includes all others; deploy, train and approve include read;
    Prefect flows need deploy and ledger.
    """

    READ = "read"
    DEPLOY = "deploy"
    TRAIN = "train"  # allows submitting, pausing and cancelling training jobs, and sweeps of them
    ADMIN = "admin"
    WORKER = "worker"
    LEDGER = "ledger"  # allows recording finished stages
    APPROVE = "approve"  # allows deciding on promotions that wait for an approval
    JOIN = "join"  # of join tokens only: one route, once for each node


GrantedScope = Literal[
    Scope.READ,
    Scope.DEPLOY,
    Scope.TRAIN,
    Scope.ADMIN,
    Scope.WORKER,
    Scope.LEDGER,
    Scope.APPROVE,
]


def revoked_admission(token_id: str) -> str:
    """Return the entry that revokes the certificates of one admission in ``barred`` lists."""
    return f"join.{token_id}"


class TokenRecord(Record):
    """A token as stored; times are seconds since the Unix epoch."""

    token_id: Name
    kind: Literal["access", "join"] = "access"
    name: str = Field(max_length=128)
    scopes: tuple[Scope, ...] = Field(min_length=1, max_length=len(Scope))
    sha256: Sha256
    worker_id: Name | None = None  # bound to this worker
    team: str | None = Field(default=None, exclude_if=is_none)  # its jobs are this team's
    project: str | None = Field(default=None, exclude_if=is_none)  # and this project's
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    used_at: float | None = None  # when a join token was spent
    last_used_at: float | None = None  # to within an hour
    key_sha256: Sha256 | None = None  # of a spent join token: the public key it was spent for
    # Of a worker's token issued by joining or renewing: the first token of the chain of renewals,
    # when this token was first used, and when its successor was.
    admission: Name | None = None
    begun_at: float | None = None
    replaced_at: float | None = None
    # The authorities that came with it (``rotation.trusted_set``); None before any was replaced.
    authority: Sha256 | None = Field(default=None, exclude_if=is_none)
    # Of a group join token: how many nodes may join with it, and how many have.
    nodes: int | None = Field(default=None, exclude_if=is_none)
    joined: int | None = Field(default=None, exclude_if=is_none)
    # Of a join token: the networks that it is accepted from; (): from any.
    networks: tuple[str, ...] = Field(default=(), exclude_if=is_empty)


class TokenView(Record):
    """A token without its digest, as responses show it."""

    token_id: Name  # to revoke it by
    kind: Literal["access", "join"]  # join: nodes join with it
    name: str  # of its owner
    scopes: tuple[Scope, ...]  # what it may do
    worker_id: Name | None = None
    created_at: float
    expires_at: float | None = None  # seconds since the Unix epoch; None: no end
    revoked_at: float | None = None  # or replaced by its successor
    used_at: float | None = None  # when a join token was spent
    last_used_at: float | None = None  # to within an hour
    # fingerprint of the authorities that came with it
    authority: Sha256 | None = Field(default=None, exclude_if=is_none)
    # its jobs are this team's; None: any team's
    team: str | None = Field(default=None, exclude_if=is_none)
    project: str | None = Field(default=None, exclude_if=is_none)
    nodes: int | None = Field(default=None, exclude_if=is_none)  # that may join with it
    joined: int | None = Field(default=None, exclude_if=is_none)  # that have joined with it
    # that it is accepted from; (): any
    networks: tuple[str, ...] = Field(default=(), exclude_if=is_empty)

    @classmethod
    def of(cls, record: TokenRecord, last_used_at: float | None = None) -> TokenView:
        """Return the view of ``record``; ``last_used_at`` overrides the stored time."""
        shown = record.model_dump(include=set(cls.model_fields))
        ended_at = record.revoked_at or record.replaced_at
        used_at = last_used_at or record.last_used_at
        return cls.model_validate(shown | {"revoked_at": ended_at, "last_used_at": used_at})


class TokenList(Record):
    tokens: tuple[TokenView, ...]  # oldest first


class CreateToken(Record):
    """Create a bearer token; ``worker_id`` requires the scope worker and no other."""

    # of its owner, as audit rows name it
    name: str = Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._@-]*$")
    # what it may do
    scopes: tuple[GrantedScope, ...] = Field(min_length=1, max_length=len(get_args(GrantedScope)))
    ttl_seconds: float | None = Field(default=None, gt=0, le=10 * 365 * 86_400)  # None: no end
    worker_id: Name | None = None
    # Whose jobs it submits and controls, with the scope train; None: any team's, any project's.
    team: Team | None = None
    project: ProjectName | None = Field(default=None, exclude_if=is_none)


class CreateJoinToken(Record):
    """Create a join token: for the one worker ``worker_id``, or a group token for ``nodes`` nodes
    with names that no worker has yet.
    """

    worker_id: Name | None = Field(default=None, exclude_if=is_none)
    # how many may join with it; None: the one worker
    nodes: int | None = Field(default=None, ge=1, le=10_000, exclude_if=is_none)
    ttl_seconds: float = Field(default=3600, gt=0, le=7 * 86_400)  # how long it is valid
    # The networks that callers' connections must come from; (): any.
    networks: Networks = Field(default=(), exclude_if=is_empty)

    @model_validator(mode="after")
    def _is_for_one_or_many(self) -> Self:
        if (self.worker_id is None) == (self.nodes is None):
            raise ValueError("wants worker_id (for one node) or nodes (for many), and not both")
        return self


class CreatedToken(Record):
    """A new token; the only response that contains its secret."""

    token: str  # the secret; it is in no later answer
    record: TokenView  # what is stored of it
    ca_sha256: Sha256 | None = None  # fingerprint of the authority that its owner should expect


# The beginning of snapshots' URLs, or the label (``data.purpose``) that snapshots carry.
DataSelector = Annotated[
    str, StringConstraints(pattern=r"^((s3|file)://[!-~]+|[A-Za-z0-9][A-Za-z0-9._-]*)$")
]


class AllowPurpose(Record):
    """Allow data to be used for a purpose; no teams or projects: of any."""

    purpose: Name  # that the data may be used for
    # (): the snapshots that carry the purpose as their label
    data: tuple[Annotated[DataSelector, Field(max_length=1000)], ...] = Field((), max_length=100)
    teams: tuple[Team, ...] = Field(default=(), max_length=100)  # who may; (): all teams
    projects: tuple[ProjectName, ...] = Field(default=(), max_length=100)  # (): for all projects
    reason: Text = Field(default="", max_length=500)
    ttl_seconds: float | None = Field(default=None, gt=0, le=10 * 365 * 86_400)  # None: no end


class PurposeRule(Record):
    """A purpose as allowed by an admin. One that was revoked or has expired allows nothing, and
    stays in the table.
    """

    rule_id: Annotated[str, StringConstraints(pattern=RULE_ID)]  # by which it is withdrawn
    purpose: Name  # that the data may be used for
    data: tuple[str, ...]  # beginnings of URLs, or labels of snapshots
    teams: tuple[str, ...]  # who may; (): all teams
    projects: tuple[str, ...]  # for which; (): all projects
    reason: str = ""
    approver: str  # the name of the admin's token
    allowed_at: float  # seconds since the Unix epoch, as all times
    expires_at: float | None = None  # seconds since the Unix epoch; None: never
    revoked_at: float | None = None  # seconds since the Unix epoch; None: it holds
    revoked_by: str = ""  # the token's name

    def is_in_force(self, now: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


class PurposeList(Record):
    rules: tuple[PurposeRule, ...]  # those that no longer hold too


class PurposesShown(PurposeList):
    """Output of `paceline purposes list --json`."""

    status: Literal["complete"] = "complete"


class PurposeShown(PurposeRule):
    """Output of `paceline purposes` allow and revoke with --json."""

    status: Literal["complete"] = "complete"


class JoinWorker(Record):
    """Request of an agent to become ``worker_id``; its private key stays on the node."""

    worker_id: Name
    csr: Pem  # PKCS #10, PEM; only its public key is used


class WorkerIdentity(Record):
    """Certificate, tokens and settings that an agent needs to be a worker of this fleet."""

    worker_id: Name
    certificate: Pem  # of the worker
    ca: Pem  # of the fleet, which the worker trusts
    rest_ca: Pem | None = None  # CA of the REST port; None: plain, or the system's CAs
    # While the authority is replaced: the one that is trusted beside ``ca``.
    other_ca: Pem | None = Field(default=None, exclude_if=is_none)
    # The signatures (hex) of each of the two over the other: over ``ca``, over ``other_ca``.
    endorsements: tuple[str, ...] = Field(default=(), max_length=2, exclude_if=is_empty)
    certificate_expires_at: float  # seconds since the Unix epoch
    token: str  # of scope worker, bound to worker_id
    token_expires_at: float  # seconds since the Unix epoch
    peer_token: str  # shared by all workers; checked besides the certificates
    renew_at: float  # when to renew certificate and token
    coordinator_urls: tuple[str, ...]  # of every replica
    profile: dict[str, object]  # the installation's profile without the servers' sections


class TokenMade(CreatedToken):
    """Output of `paceline tokens create` and `tokens join` with --json."""

    status: Literal["complete"] = "complete"


class TokensShown(TokenList):
    """Output of `paceline tokens list --json`."""

    status: Literal["complete"] = "complete"


class TokenRevoked(Record):
    """Output of `paceline tokens revoke --json`."""

    status: Literal["complete"] = "complete"
    token_id: Name  # the first of ``token_ids``
    token_ids: tuple[Name, ...]  # with --worker-id all that the worker has


class FleetInitialised(Record):
    """Output of `paceline init --json`."""

    status: Literal["initialised"] = "initialised"
    state: str  # the directory to copy to each replica's machine
    coordinators: tuple[str, ...]
    authority: str  # SHA-256 of the certificate, as in join tokens
    client: str  # the file for `paceline login`; no secrets
    missing: tuple[str, ...] = ()  # what the profile names and is not there yet
    prefect_worker: str = ""  # the file of variables for a Prefect worker; "": no Prefect is named


class AuthorityShown(Record):
    """Output of `paceline authority … --json`."""

    status: Literal["complete"] = "complete"
    signing: Sha256  # fingerprint of the authority that signs
    beside: Sha256 | None = None  # of the one that is trusted too, while it is replaced
    next_step: Literal["add", "switch", "retire"]
    current: tuple[Name, ...]  # living workers whose certificates and trust are as of now
    behind: tuple[Name, ...]  # living workers that have yet to renew
    away: tuple[Name, ...]  # workers that are not alive


class AuditShown(Record):
    """Output of `paceline audit --json`, oldest first."""

    status: Literal["complete"] = "complete"
    events: tuple[Event, ...]
