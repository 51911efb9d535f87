"""The tokens of an installation: issue, verify, renew and revoke.

Pure like the rest of the state machine: events go in, effects come out, times are arguments. It
holds the SHA-256 of each token, never the secret; the caller draws secrets (``draw``).
``authenticate`` takes no lock, because a record is replaced as a whole and never mutated.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from paceline.coordinator.state import (
    AdmitWorker,
    Answer,
    Drop,
    Effect,
    IssueToken,
    RevokeToken,
    Save,
    TokenEvent,
    TokenFirstUsed,
    TokensUsed,
)
from paceline.errors import AccessDenied, Conflict, InvalidInput, NotFound
from paceline.schemas import CreateToken, Scope, Success, TokenRecord, TokenView, revoked_admission

SECRET_BYTES = 32
MAX_REVOCATIONS = 1000
MAX_TOKENS = 50_000  # usable and remembered: 10,000 workers that renew, and people
MAX_UNUSED = 4  # of one admission: answers to joining or renewing that may be in flight
KEEP_ENDED_S = 30 * 86_400.0  # how long `list` still shows an unusable token
INCLUDES: dict[Scope, frozenset[Scope]] = {
    Scope.READ: frozenset({Scope.READ}),
    Scope.DEPLOY: frozenset({Scope.DEPLOY, Scope.READ}),
    Scope.TRAIN: frozenset({Scope.TRAIN, Scope.READ}),
    Scope.WORKER: frozenset({Scope.WORKER}),
    Scope.LEDGER: frozenset({Scope.LEDGER}),
    Scope.APPROVE: frozenset({Scope.APPROVE, Scope.READ}),
    Scope.ADMIN: frozenset(Scope) - {Scope.JOIN},
    Scope.JOIN: frozenset({Scope.JOIN}),
}
_FORM = re.compile(r"pl_([0-9a-z]{16})_[A-Za-z0-9_-]{43}(?:_[0-9a-f]{64})?")


@dataclass(frozen=True, slots=True)
class NewToken:
    """A new token: its public id, the text to show once, and the stored digest."""

    token_id: str
    text: str
    sha256: str


def new_token(ca_sha256: str | None = None) -> NewToken:
    """Return a new random token; a join token's text ends with its authority's fingerprint."""
    token_id = secrets.token_hex(8)
    text = f"pl_{token_id}_{secrets.token_urlsafe(SECRET_BYTES)}"
    if ca_sha256 is not None:
        text = f"{text}_{ca_sha256}"
    return NewToken(token_id, text, sha256_of(text))


def sha256_of(token: str) -> str:
    """Return the stored digest of ``token``; accepts any text."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def member_id(group_id: str, worker_id: str, key_sha256: str | None) -> str:
    """Return the id of the join token that stands for one node of a group join token.

    It depends on the node's key: the same request again is the same node, another is not.
    """
    return sha256_of(f"{group_id} {worker_id} {key_sha256}")[:32]


def scopes_of(record: TokenRecord) -> frozenset[Scope]:
    """Return every scope that ``record`` grants, included ones too."""
    return frozenset().union(*(INCLUDES[scope] for scope in record.scopes))


class TokenRegistry:
    """Every token record; ``handle`` is the only way to change them."""

    def __init__(self, is_registered: Callable[[str], bool] = lambda _: False) -> None:
        """``is_registered``: whether the fleet has a worker of this id, with a token or without."""
        self._is_registered = is_registered
        self._tokens: dict[str, TokenRecord] = {}
        self._ids_of: dict[str, set[str]] = {}  # token ids of each worker, of every kind
        self._barred: tuple[str, ...] | None = ()  # None: to be computed

    def restore(self, tokens: Iterable[TokenRecord]) -> None:
        self._tokens, self._ids_of = {}, {}
        self._apply([Save(each) for each in tokens])

    def tokens(self) -> list[TokenRecord]:
        return sorted(self._tokens.values(), key=lambda each: (each.created_at, each.token_id))

    def barred(self) -> tuple[str, ...]:
        """Return the names whose certificates peers must refuse until they expire.

        A worker whose identity was revoked is named itself; once it has a new identity, its earlier
        admissions are named instead (``revoked_admission``). At most ``MAX_REVOCATIONS``, newest
        first.
        """
        if self._barred is None:
            self._barred = self._find_revoked()
        return self._barred

    def _find_revoked(self) -> tuple[str, ...]:
        taken: dict[str, float] = {}  # by worker: when an identity was last revoked
        for each in self._tokens.values():
            if each.worker_id and each.kind == "access" and each.revoked_at is not None:
                taken[each.worker_id] = max(taken.get(each.worker_id, 0.0), each.revoked_at)
        found: dict[str, float] = {}
        for worker_id, at in taken.items():
            mine = self._identities(worker_id)
            good = [
                each
                for each in mine
                if each.revoked_at is None
                and each.replaced_at is None
                and (each.expires_at or math.inf) > at
            ]
            if not good:
                found[worker_id] = at
                continue
            held = {each.admission for each in good}
            for each in mine:
                if each.revoked_at is not None and each.admission and each.admission not in held:
                    found[revoked_admission(each.admission)] = each.revoked_at
        return tuple(sorted(found, key=lambda name: -found[name])[:MAX_REVOCATIONS])

    def _of(self, worker_id: str) -> list[TokenRecord]:
        found = [self._tokens[each] for each in self._ids_of.get(worker_id, ())]
        return sorted(found, key=lambda each: (each.created_at, each.token_id))

    def _identities(self, worker_id: str) -> list[TokenRecord]:
        """Return every access token that authenticates as ``worker_id``, oldest first."""
        return [each for each in self._of(worker_id) if each.kind == "access"]

    def find(self, token_id: str) -> TokenRecord | None:
        return self._tokens.get(token_id)

    def authenticate(self, token: str, now: float) -> TokenRecord:
        """Return the record of ``token``; raises AccessDenied with the reason where it is unusable.

        A wrong secret gets no information about the token whose id it carries.
        """
        form = _FORM.fullmatch(token)
        record = self._tokens.get(form[1]) if form else None
        if record is None or not hmac.compare_digest(record.sha256, sha256_of(token)):
            raise AccessDenied("the token is not accepted", do="Ask an admin for a token.")
        # A used join token passes here: its key decides whether it is answered again.
        if (why := unusable_reason(record, now, record.key_sha256)) is not None:
            raise AccessDenied(
                f"the token {why}", got=record.token_id, do="Ask an admin for another token."
            )
        return record

    def is_in_use(self, worker_id: str, now: float) -> bool:
        """Return whether an identity of ``worker_id`` is usable and was used."""
        return any(
            each.begun_at is not None and unusable_reason(each, now) is None
            for each in self._identities(worker_id)
        )

    def handle(self, event: TokenEvent) -> list[Effect]:
        match event:
            case IssueToken():
                return self._issue(event)
            case RevokeToken():
                return self._revoke(event)
            case AdmitWorker():
                return self._admit(event)
            case TokenFirstUsed():
                return self._begin(event)
            case TokensUsed():
                return self._used(event)

    def _issue(self, event: IssueToken) -> list[Effect]:
        call, at = event.call, event.at
        _require_worker_name(call.worker_id or "")
        if isinstance(call, CreateToken):
            if call.worker_id is not None and call.scopes != (Scope.WORKER,):
                raise InvalidInput(
                    "only a token of scope worker alone can be bound to a worker",
                    got=", ".join(call.scopes),
                    wanted="worker",
                )
            if (call.team or call.project) and Scope.TRAIN not in call.scopes:
                raise InvalidInput(
                    "a token that is bound to a team or project is one that submits jobs",
                    got=", ".join(call.scopes),
                    wanted="train",
                )
            record = TokenRecord(
                token_id=event.token_id,
                name=call.name,
                scopes=tuple(dict.fromkeys(call.scopes)),
                sha256=event.sha256,
                worker_id=call.worker_id,
                team=call.team,
                project=call.project,
                created_at=at,
                expires_at=None if call.ttl_seconds is None else at + call.ttl_seconds,
            )
        else:
            record = TokenRecord(
                token_id=event.token_id,
                kind="join",
                name=f"join {call.worker_id or f'of {call.nodes} nodes'}"[:128],
                scopes=(Scope.JOIN,),
                sha256=event.sha256,
                worker_id=call.worker_id,
                created_at=at,
                expires_at=at + call.ttl_seconds,
                nodes=call.nodes,
                joined=None if call.nodes is None else 0,
                networks=call.networks,
            )
        effects = self._forget(at)
        self._require_room(len(effects))
        return [*self._apply([*effects, Save(record)]), Answer(TokenView.of(record))]

    def _revoke(self, event: RevokeToken) -> list[Effect]:
        record = self._tokens.get(event.token_id)
        if record is None:
            raise NotFound(
                "no such token", got=event.token_id[:200], do="See `paceline tokens list`."
            )
        # A repeated revocation spares tokens issued since: the worker was admitted again.
        until = math.inf if record.revoked_at is None else record.revoked_at
        effects: list[Effect] = [
            Save(each.model_copy(update={"revoked_at": event.at}))
            for each in self._revoked_with(record)
            if each.revoked_at is None and each.created_at < until
        ]
        return [*self._apply(effects), Answer(Success())]

    def _revoked_with(self, record: TokenRecord) -> list[TokenRecord]:
        """Return every token that is revoked together with ``record``, itself last.

        For a worker's token these are all tokens of the worker; for a join token, those of its
        admission; for a group join token, itself alone: its nodes keep theirs.
        """
        others = [] if record.worker_id is None else self._of(record.worker_id)
        if record.kind == "join":
            others = [each for each in others if each.admission == record.token_id]
        return [*(each for each in others if each is not record), record]

    def _admit(self, event: AdmitWorker) -> list[Effect]:
        _require_worker_name(event.worker_id)
        shown, group, at = self._usable(event.spends, event), None, event.at
        if shown.nodes is not None:
            group, shown = shown, self._member(shown, event)
        if shown.worker_id != event.worker_id:
            raise AccessDenied(
                "the token is another worker's", got=event.worker_id, wanted=shown.worker_id
            )
        made = TokenRecord(
            token_id=event.token_id,
            name=f"worker {event.worker_id}"[:128],
            scopes=(Scope.WORKER,),
            sha256=event.sha256,
            worker_id=event.worker_id,
            created_at=at,
            expires_at=event.expires_at,
            admission=shown.admission or shown.token_id,
            authority=event.authority,
        )
        effects = self._forget(at)
        if shown.kind == "join" and shown.used_at is None:
            spent = {"used_at": at, "key_sha256": event.key_sha256}
            effects.append(Save(shown.model_copy(update=spent)))
            if group is not None:
                joined = {"joined": (group.joined or 0) + 1}
                effects.append(Save(group.model_copy(update=joined)))
        unused = []
        for other in self._of(event.worker_id):
            unspent = other.kind == "join" and other.used_at is None
            if unspent or unusable_reason(other, at, other.key_sha256) is not None:
                continue
            if other.token_id in (shown.token_id, made.admission):
                continue
            if other.admission != made.admission:
                # A node that joins again lost its tokens: they must not remain usable.
                effects.append(Save(other.model_copy(update={"revoked_at": at})))
            elif other.begun_at is None:
                unused.append(other)
        # An answer may be lost, and requested again while the first is still in flight.
        effects += [_end(e, made, at) for e in unused[: 1 - MAX_UNUSED]]
        self._require_room(sum(isinstance(each, Drop) for each in effects))
        return [*self._apply([*effects, Save(made)]), Answer(TokenView.of(made))]

    def _usable(self, token_id: str, event: AdmitWorker) -> TokenRecord:
        """Return the token if the event's key and address may use it; raises AccessDenied."""
        record = self._tokens.get(token_id)
        why = unusable_reason(record, event.at, event.key_sha256) if record else "is not known"
        if record is None or why is not None:
            raise AccessDenied(f"the token {why}", got=token_id, do="Make another join token.")
        if record.networks and not _is_within(event.address, record.networks):
            raise AccessDenied(
                "the token is not for this network",
                got=event.address or "no address",
                wanted=", ".join(record.networks),
                do="Join from there, or make a token for it: `paceline tokens join --from`.",
            )
        return record

    def _member(self, group: TokenRecord, event: AdmitWorker) -> TokenRecord:
        """Return the join token of one node of ``group``: an unspent one, or, if this key has
        joined under this name already, the one that it spent.

        A group token names no worker, so it opens no name that was given or promised to one.
        """
        worker_id = event.worker_id
        token_id = member_id(group.token_id, worker_id, event.key_sha256)
        if token_id in self._tokens:
            return self._usable(token_id, event)
        mine = [each for each in self._of(worker_id) if unusable_reason(each, event.at) is None]
        if mine or self._identities(worker_id) or self._is_registered(worker_id):
            # Conflict: a node that holds this identity may go on with it.
            holds = any(each.kind == "access" for each in mine)
            raise (Conflict if holds else AccessDenied)(
                "a group token admits new names only",
                got=f"{worker_id}, which {'is' if holds else 'was, or is to be,'} another node",
                wanted="a name that no worker has had",
                do="Join under another --worker-id, or with a token made for this one:"
                f" `paceline tokens join --worker-id {worker_id}`.",
            )
        if group.joined == group.nodes:
            raise AccessDenied(
                "the token is used up",
                got=f"{group.joined} nodes have joined with it",
                wanted="a token with uses left",
                do="Make another one: `paceline tokens join --nodes N`.",
            )
        return TokenRecord(
            token_id=token_id,
            kind="join",
            name=f"join by {group.token_id} of {worker_id}"[:128],
            scopes=(Scope.JOIN,),
            sha256=group.sha256,
            worker_id=worker_id,
            created_at=event.at,
            expires_at=group.expires_at,
        )

    def _begin(self, event: TokenFirstUsed) -> list[Effect]:
        """End the predecessors of a worker's token on its first use."""
        record, at = self._tokens.get(event.token_id), event.at
        if (
            record is None
            or record.admission is None
            or record.begun_at is not None
            or unusable_reason(record, at) is not None
        ):
            return []
        effects: list[Effect] = []
        for other in self._identities(record.worker_id or ""):
            if other is record or record.admission not in (other.admission, other.token_id):
                continue
            if other.replaced_at is not None and _outlasts(record, other):
                effects.append(
                    Drop(TokenRecord, (other.token_id,))
                )  # one predecessor is remembered
            elif unusable_reason(other, at) is None:
                effects.append(_end(other, record, at))
        return self._apply([*effects, Save(record.model_copy(update={"begun_at": at}))])

    def _used(self, event: TokensUsed) -> list[Effect]:
        effects: list[Effect] = []
        for token_id, at in event.uses:
            record = self._tokens.get(token_id)
            if record is not None and (record.last_used_at or 0.0) < at:
                effects.append(Save(record.model_copy(update={"last_used_at": at})))
        return self._apply(effects)

    def _forget(self, now: float) -> list[Effect]:
        return [
            Drop(TokenRecord, (each.token_id,))
            for each in self._tokens.values()
            if (ended := _ended_at(each)) is not None and ended < now - KEEP_ENDED_S
        ]

    def _require_room(self, forgotten: int) -> None:
        if len(self._tokens) - forgotten >= MAX_TOKENS:
            raise Conflict(
                "there are too many tokens",
                got=len(self._tokens),
                wanted=f"fewer than {MAX_TOKENS}",
                do="Revoke what is not used; what opens nothing is forgotten after 30 days.",
            )

    def _apply(self, effects: list[Effect]) -> list[Effect]:
        for each in effects:
            match each:
                case Save(TokenRecord() as token):
                    known = self._tokens.get(token.token_id)
                    if known is None or known.revoked_at != token.revoked_at:
                        self._barred = None
                    self._tokens[token.token_id] = token
                    if token.worker_id is not None:
                        self._ids_of.setdefault(token.worker_id, set()).add(token.token_id)
                case Drop(key=(token_id,)):
                    dropped = self._tokens.pop(token_id, None)
                    if dropped is not None and dropped.worker_id is not None:
                        mine = self._ids_of[dropped.worker_id]
                        mine.discard(token_id)
                        if not mine:
                            del self._ids_of[dropped.worker_id]
                    self._barred = None
        return effects


def unusable_reason(record: TokenRecord, now: float, key_sha256: str | None = None) -> str | None:
    """Return why ``record`` is unusable at ``now``, or None while it is usable.

    A join token used for the key ``key_sha256`` stays valid for that key until it expires.
    """
    if record.revoked_at is not None:
        return "was revoked"
    if record.replaced_at is not None:
        return "was replaced by the one that it was renewed for"
    if record.used_at is not None and (key_sha256 is None or record.key_sha256 != key_sha256):
        return "was used already; a join token works once"
    if record.expires_at is not None and record.expires_at <= now:
        return "has expired"
    return None


def _require_worker_name(worker_id: str) -> None:
    """Raise InvalidInput for a name by which peers would refuse an admission, not a worker."""
    if worker_id.startswith(start := revoked_admission("")):
        raise InvalidInput(
            "this name is not for workers",
            got=worker_id,
            wanted=f"one that does not begin with {start!r}",
            where="worker_id",
            do="Join under another --worker-id.",
        )


def _is_within(address: str, networks: Iterable[str]) -> bool:
    """Return whether ``address`` lies in one of ``networks``; what is no IP address does not."""
    try:
        found = ip_address(address)
    except ValueError:
        return False
    # A socket that takes both versions has IPv4 callers as ::ffff:a.b.c.d.
    found = getattr(found, "ipv4_mapped", None) or found
    return any(found in ip_network(each) for each in networks)


def _end(record: TokenRecord, successor: TokenRecord, at: float) -> Effect:
    """Return the effect that ends ``record``; one that was never used is dropped."""
    if record.admission and record.begun_at is None and _outlasts(successor, record):
        return Drop(TokenRecord, (record.token_id,))
    return Save(record.model_copy(update={"replaced_at": at}))


def _outlasts(record: TokenRecord, other: TokenRecord) -> bool:
    """Return whether ``record`` is remembered until the certificate of ``other`` expires."""
    return other.expires_at is not None and (record.expires_at or 0.0) >= other.expires_at


def _ended_at(record: TokenRecord) -> float | None:
    ends = (record.revoked_at, record.replaced_at, record.used_at, record.expires_at)
    known = [each for each in ends if each is not None]
    if not known:
        return None
    # A worker's certificate expires with its token: until then peers need the revocation.
    return max(known) if record.worker_id and record.kind == "access" else min(known)
