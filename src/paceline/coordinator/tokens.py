"""The tokens of an installation: which there are, what each is good for, and how they change.

Pure like the rest of the state machine: events go in, effects come out, times are given. It never
sees a secret, only the SHA-256 of the whole token; secrets are drawn by whoever asks (``draw``).
Reading (``recognise``) takes no lock: a record is replaced whole, never changed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.coordinator.messages import (
    AdmitWorker,
    Answer,
    DropToken,
    Effect,
    IssueToken,
    KeepToken,
    RevokeToken,
    TokenEvent,
    TokensUsed,
)
from paceline.errors import AccessDenied, Conflict, InvalidInput, NotFound
from paceline.wire.access import CreateToken, Scope, TokenRecord, TokenView
from paceline.wire.calls import Success

SECRET_BYTES = 32
MAX_BARRED = 1000
MAX_TOKENS = 50_000  # living and remembered: 10,000 workers that renew, and people
REMEMBERED_S = 30 * 86_400.0  # how long `list` still shows one that opens nothing any more
INCLUDES: dict[Scope, frozenset[Scope]] = {
    Scope.READ: frozenset({Scope.READ}),
    Scope.DEPLOY: frozenset({Scope.DEPLOY, Scope.READ}),
    Scope.WORKER: frozenset({Scope.WORKER}),
    Scope.LEDGER: frozenset({Scope.LEDGER}),
    Scope.ADMIN: frozenset({Scope.ADMIN, Scope.DEPLOY, Scope.READ, Scope.WORKER, Scope.LEDGER}),
    Scope.JOIN: frozenset({Scope.JOIN}),
}
_FORM = re.compile(r"pl_([0-9a-z]{16})_[A-Za-z0-9_-]{43}(?:_[0-9a-f]{64})?")


@dataclass(frozen=True, slots=True)
class Drawn:
    """A new token: its public id, the text to hand over once, and what is kept of it."""

    token_id: str
    text: str
    sha256: str


def draw(ca_sha256: str | None = None) -> Drawn:
    """Return a new random token; a join token's text ends with its authority's fingerprint."""
    token_id = secrets.token_hex(8)
    text = f"pl_{token_id}_{secrets.token_urlsafe(SECRET_BYTES)}"
    if ca_sha256 is not None:
        text = f"{text}_{ca_sha256}"
    return Drawn(token_id, text, sha256_of(text))


def sha256_of(token: str) -> str:
    """Return what is kept of ``token``; raises nothing, whatever the text is."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def scopes_of(record: TokenRecord) -> frozenset[Scope]:
    """Return every scope that ``record`` opens, included ones too."""
    return frozenset().union(*(INCLUDES[scope] for scope in record.scopes))


class TokenBook:
    """Every token; ``handle`` is the only way to change them.

    ``standing`` ones belong to the installation itself: they are known by their digest alone, are
    not kept, and cannot be revoked.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, TokenRecord] = {}
        self._barred: tuple[str, ...] | None = ()  # None: to be found anew

    def restore(self, tokens: Iterable[TokenRecord]) -> None:
        """Begin with what the store kept."""
        self._tokens = {each.token_id: each for each in tokens}
        self._barred = None

    def tokens(self) -> list[TokenRecord]:
        """Return every token that is remembered, oldest first."""
        return sorted(self._tokens.values(), key=lambda each: (each.created_at, each.token_id))

    def barred(self) -> tuple[str, ...]:
        """Return the workers whose identity was taken back, and who have got no other since.

        Their certificates may be good for a long time yet. At most ``MAX_BARRED``, newest first.
        """
        if self._barred is None:
            self._barred = self._find_barred()
        return self._barred

    def _find_barred(self) -> tuple[str, ...]:
        taken: dict[str, float] = {}
        for each in self._identities():
            if each.revoked_at is not None:
                taken[each.worker_id or ""] = max(
                    taken.get(each.worker_id or "", 0.0), each.revoked_at
                )
        for each in self._identities():
            if each.revoked_at is None and (
                each.expires_at is None or each.expires_at > taken.get(each.worker_id or "", 0.0)
            ):
                taken.pop(each.worker_id or "", None)  # another one was good when it was taken
        return tuple(sorted(taken, key=lambda worker_id: -taken[worker_id])[:MAX_BARRED])

    def _identities(self) -> Iterable[TokenRecord]:
        """Yield every token that makes its bearer one certain worker."""
        return (each for each in self._tokens.values() if each.worker_id and each.kind == "access")

    def find(self, token_id: str) -> TokenRecord | None:
        """Return the token of this id, or None."""
        return self._tokens.get(token_id)

    def recognise(self, token: str, now: float) -> TokenRecord:
        """Return the record of ``token``; raises AccessDenied saying why it opens nothing.

        Whoever shows a wrong secret learns nothing of the token whose id it carries.
        """
        form = _FORM.fullmatch(token)
        record = self._tokens.get(form[1]) if form else None
        if record is None or not hmac.compare_digest(record.sha256, sha256_of(token)):
            raise AccessDenied("the token is not accepted", do="Ask an admin for a token.")
        if (why := why_dead(record, now)) is not None:
            raise AccessDenied(
                f"the token {why}", got=record.token_id, do="Ask an admin for another token."
            )
        return record

    def handle(self, event: TokenEvent) -> list[Effect]:
        """Take one event and return what must be kept and answered."""
        match event:
            case IssueToken():
                return self._issue(event)
            case RevokeToken():
                return self._revoke(event)
            case AdmitWorker():
                return self._admit(event)
            case TokensUsed():
                return self._used(event)

    def _issue(self, event: IssueToken) -> list[Effect]:
        call, at = event.call, event.at
        if isinstance(call, CreateToken):
            if call.worker_id is not None and call.scopes != (Scope.WORKER,):
                raise InvalidInput(
                    "only a token of scope worker alone can be bound to a worker",
                    got=", ".join(call.scopes),
                    wanted="worker",
                )
            record = TokenRecord(
                token_id=event.token_id,
                name=call.name,
                scopes=tuple(dict.fromkeys(call.scopes)),
                sha256=event.sha256,
                worker_id=call.worker_id,
                created_at=at,
                expires_at=None if call.ttl_seconds is None else at + call.ttl_seconds,
            )
        else:
            record = TokenRecord(
                token_id=event.token_id,
                kind="join",
                name=f"join {call.worker_id}"[:128],
                scopes=(Scope.JOIN,),
                sha256=event.sha256,
                worker_id=call.worker_id,
                created_at=at,
                expires_at=at + call.ttl_seconds,
            )
        effects = self._forget(at)
        self._require_room(len(effects))
        return [*self._apply([*effects, KeepToken(record)]), Answer(TokenView.of(record))]

    def _revoke(self, event: RevokeToken) -> list[Effect]:
        record = self._tokens.get(event.token_id)
        if record is None:
            raise NotFound(
                "no such token", got=event.token_id[:200], do="See `paceline tokens list`."
            )
        if record.revoked_at is not None:
            return [Answer(Success())]
        revoked = record.model_copy(update={"revoked_at": event.at})
        return [*self._apply([KeepToken(revoked)]), Answer(Success())]

    def _admit(self, event: AdmitWorker) -> list[Effect]:
        shown, at = self._tokens.get(event.spends), event.at
        if shown is None or (why := why_dead(shown, at)) is not None:
            reason = "is not known" if shown is None else f"{why}"
            raise AccessDenied(
                f"the token {reason}", got=event.spends, do="Make another join token."
            )
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
        )
        effects = self._forget(at)
        if shown.kind == "join":
            effects.append(KeepToken(shown.model_copy(update={"used_at": at})))
        for other in self._of_worker(event.worker_id, at):
            # A node that joins again lost what it had: nobody else shall go on with it. One that
            # renews keeps what it showed, in case that this answer does not arrive.
            if other.token_id != shown.token_id:
                effects.append(KeepToken(other.model_copy(update={"revoked_at": at})))
        self._require_room(sum(isinstance(each, DropToken) for each in effects))
        return [*self._apply([*effects, KeepToken(made)]), Answer(TokenView.of(made))]

    def _used(self, event: TokensUsed) -> list[Effect]:
        effects: list[Effect] = []
        for token_id, at in event.uses:
            record = self._tokens.get(token_id)
            if record is not None and (record.last_used_at or 0.0) < at:
                effects.append(KeepToken(record.model_copy(update={"last_used_at": at})))
        return self._apply(effects)

    def _of_worker(self, worker_id: str, now: float) -> list[TokenRecord]:
        return [
            each
            for each in self._tokens.values()
            if each.worker_id == worker_id and each.kind == "access" and not why_dead(each, now)
        ]

    def _forget(self, now: float) -> list[Effect]:
        return [
            DropToken(each.token_id)
            for each in self._tokens.values()
            if (ended := _ended_at(each)) is not None and ended < now - REMEMBERED_S
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
            if isinstance(each, KeepToken):
                known = self._tokens.get(each.token.token_id)
                if known is None or known.revoked_at != each.token.revoked_at:
                    self._barred = None
                self._tokens[each.token.token_id] = each.token
            elif isinstance(each, DropToken):
                self._tokens.pop(each.token_id, None)
                self._barred = None
        return effects


def why_dead(record: TokenRecord, now: float) -> str | None:
    """Return why ``record`` opens nothing at ``now``, or None while it does."""
    if record.revoked_at is not None:
        return "was revoked"
    if record.used_at is not None:
        return "was used already; a join token works once"
    if record.expires_at is not None and record.expires_at <= now:
        return "has expired"
    return None


def _ended_at(record: TokenRecord) -> float | None:
    known = [t for t in (record.revoked_at, record.used_at, record.expires_at) if t is not None]
    if not known:
        return None
    # A worker's certificate ends with its token: until then peers must be told of it.
    return max(known) if record.worker_id and record.kind == "access" else min(known)
