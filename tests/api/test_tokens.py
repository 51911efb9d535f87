"""The book of tokens against a model of it, and across a death of the coordinator."""

import signal

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.client import AccessClient, CoordinatorClient
from paceline.coordinator import (
    KEEP_ENDED_S,
    MAX_UNUSED,
    TokenRegistry,
    new_token,
    sha256_of,
    tokens as module,
)
from paceline.coordinator.state import (
    AdmitWorker,
    Answer,
    Drop,
    IssueToken,
    RevokeToken,
    Save,
    TokenFirstUsed,
    TokensUsed,
)
from paceline.errors import AccessDenied, Conflict, NotFound
from paceline.relay.transport import new_request
from paceline.schemas import CreateJoinToken, CreateToken, JoinWorker, Scope, revoked_admission

WORKERS = st.sampled_from(["w-1", "w-2"])


class Tokens(RuleBasedStateMachine):
    """What each token opens, by a model that knows only what was asked for and when."""

    def __init__(self):
        super().__init__()
        self.book, self.now = TokenRegistry(), 1000.0
        self.kept = {}  # what a store would hold
        self.texts = {}  # token_id → text
        self.ends = {}  # token_id → when it opens nothing any more
        self.join_of, self.access_of = {}, {}  # token_id → worker
        self.admission_of = {}  # token_id of an issued one → the token that its chain began with
        self.key_of = {}  # token_id of a spent join token → the key that it was spent for
        self.begun, self.kept_at = set(), {}

    def take(self, event):
        for effect in self.book.handle(event):
            if isinstance(effect, Save):
                self.kept[effect.record.token_id] = effect.record
            elif isinstance(effect, Drop):
                del self.kept[effect.key[0]]
            else:
                assert isinstance(effect, Answer)

    def alive(self, token_id):
        return self.now < self.ends[token_id]

    def one_of_them(self, data):
        known = list(self.ends)  # in the order of their making: the ids themselves are random
        return known[data.draw(st.integers(0, len(known) - 1))]

    @rule(seconds=st.sampled_from([0.0, 1.0, 3600.0, KEEP_ENDED_S + 1]))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(ttl=st.sampled_from([None, 60.0, 7200.0]))
    def issue(self, ttl):
        drawn = new_token()
        call = CreateToken(name="x", scopes=(Scope.READ,), ttl_seconds=ttl)
        self.take(IssueToken(token_id=drawn.token_id, sha256=drawn.sha256, call=call, at=self.now))
        self.texts[drawn.token_id] = drawn.text
        self.ends[drawn.token_id] = float("inf") if ttl is None else self.now + ttl

    @rule(worker=WORKERS, ttl=st.sampled_from([60.0, 7200.0]))
    def issue_join(self, worker, ttl):
        drawn = new_token("0" * 64)
        call = CreateJoinToken(worker_id=worker, ttl_seconds=ttl)
        self.take(IssueToken(token_id=drawn.token_id, sha256=drawn.sha256, call=call, at=self.now))
        self.texts[drawn.token_id] = drawn.text
        self.ends[drawn.token_id] = self.now + ttl
        self.join_of[drawn.token_id] = worker

    @precondition(lambda self: self.ends)
    @rule(data=st.data(), worker=WORKERS, key=st.sampled_from(["1" * 64, "2" * 64]))
    def admit(self, data, worker, key):
        shown = self.one_of_them(data)
        mine = self.join_of.get(shown) or self.access_of.get(shown)
        drawn, end = new_token(), self.now + 5000.0
        event = AdmitWorker(
            spends=shown,
            worker_id=worker,
            token_id=drawn.token_id,
            sha256=drawn.sha256,
            expires_at=end,
            key_sha256=key,
            at=self.now,
        )
        if not self.alive(shown) or mine != worker or self.key_of.get(shown, key) != key:
            before = dict(self.kept)
            with pytest.raises(AccessDenied):
                self.take(event)
            assert self.kept == before, "what is refused changes nothing"
            return
        self.take(event)
        admission = self.admission_of.get(shown, shown)
        if shown in self.join_of:
            self.key_of[shown] = key
        owned = {**self.access_of, **{e: self.join_of[e] for e in self.key_of}}
        unused = []
        for token_id, owner in owned.items():
            if owner != worker or token_id in (shown, admission) or not self.alive(token_id):
                continue
            if self.admission_of.get(token_id) != admission:
                self.ends[token_id] = self.now
            elif token_id not in self.begun:
                unused.append(token_id)
        # Of one age, the ids decide.
        unused.sort(key=lambda each: (self.kept_at[each], each))
        for token_id in unused[: 1 - MAX_UNUSED]:
            self.ends[token_id] = self.now
        self.texts[drawn.token_id], self.ends[drawn.token_id] = drawn.text, end
        self.access_of[drawn.token_id], self.kept_at[drawn.token_id] = worker, self.now
        self.admission_of[drawn.token_id] = admission

    @precondition(lambda self: self.admission_of)
    @rule(data=st.data())
    def begin(self, data):
        """A token is used for the first time: whatever it was issued beside or after ends."""
        known = list(self.admission_of)
        token_id = known[data.draw(st.integers(0, len(known) - 1))]
        self.take(TokenFirstUsed(token_id=token_id, at=self.now))
        if not self.alive(token_id) or token_id in self.begun:
            return
        self.begun.add(token_id)
        admission = self.admission_of[token_id]
        for other in self.access_of:
            same = admission in (self.admission_of.get(other), other)
            if other != token_id and same and self.alive(other):
                self.ends[other] = self.now

    @precondition(lambda self: self.ends)
    @rule(data=st.data())
    def revoke(self, data):
        token_id = self.one_of_them(data)
        record = self.book.find(token_id)
        if record is None:
            with pytest.raises(NotFound):
                self.take(RevokeToken(token_id=token_id, at=self.now))
            return
        until = float("inf") if record.revoked_at is None else record.revoked_at
        made = {each.token_id: each.created_at for each in self.book.tokens()}
        self.take(RevokeToken(token_id=token_id, at=self.now))
        worker = self.access_of.get(token_id)
        for other, owner in {**self.join_of, **self.access_of}.items():
            with_it = owner == worker or self.admission_of.get(other) == token_id
            if with_it and other in made and made[other] < until:
                self.ends[other] = min(self.ends[other], self.now)
        self.ends[token_id] = min(self.ends[token_id], self.now)

    @precondition(lambda self: self.ends)
    @rule(data=st.data())
    def use(self, data):
        token_id = self.one_of_them(data)
        self.take(TokensUsed(uses=((token_id, self.now), ("nobody", self.now))))

    @rule()
    def restart(self):
        self.book = TokenRegistry()
        self.book.restore(self.kept.values())

    @invariant()
    def exactly_the_living_open_something(self):
        for token_id, text in self.texts.items():
            if self.alive(token_id):
                assert self.book.authenticate(text, self.now).token_id == token_id
            else:
                with pytest.raises(AccessDenied):
                    self.book.authenticate(text, self.now)
            with pytest.raises(AccessDenied):
                self.book.authenticate(text[:-1], self.now)

    @invariant()
    def exactly_those_whose_identity_was_taken_back_are_barred(self):
        """Nobody who holds a good identity is barred; nobody who lost the last one is not."""
        good = {owner for each, owner in self.access_of.items() if self.alive(each)}
        barred = set(self.book.barred())
        assert not barred & good
        held = {self.admission_of.get(each) for each in self.access_of if self.alive(each)}
        assert not barred & {revoked_admission(each) for each in held if each}
        for worker in set(self.access_of.values()) - good:
            mine = [
                self.kept[e]
                for e, owner in self.access_of.items()
                if owner == worker and e in self.kept
            ]
            still = [e for e in mine if e.revoked_at is not None and e.expires_at > self.now]
            # Where any certificate of it is still good, it was taken back, and peers must know.
            assert not still or worker in barred, worker
        fresh = TokenRegistry()
        fresh.restore(self.kept.values())
        assert set(fresh.barred()) == barred, "as after a restart"

    @invariant()
    def an_admission_that_was_taken_back_stays_barred(self):
        """Whatever the worker has got since, the certificates of before open no peer's port."""
        barred = set(self.book.barred())
        for worker in set(self.access_of.values()):
            mine = [e for e, owner in self.access_of.items() if owner == worker]
            held = {self.admission_of.get(each) for each in mine if self.alive(each)}
            for each in mine:
                kept, admission = self.kept.get(each), self.admission_of.get(each)
                if kept and kept.revoked_at and admission and admission not in held:
                    assert barred & {worker, revoked_admission(admission)}, each

    @invariant()
    def the_store_and_the_book_agree_and_no_secret_is_in_them(self):
        assert {each.token_id: each for each in self.book.tokens()} == self.kept
        held = repr(self.kept)
        assert not any(text.split("_", 2)[2][:43] in held for text in self.texts.values())


TestTokens = Tokens.TestCase
TestTokens.settings = settings(max_examples=10, stateful_step_count=25, deadline=None)


def test_there_are_so_many_tokens_and_no_more(monkeypatch):
    monkeypatch.setattr(module, "MAX_TOKENS", 3)
    book, call = TokenRegistry(), CreateToken(name="x", scopes=(Scope.READ,), ttl_seconds=10)

    def issue(at):
        drawn = new_token()
        book.handle(IssueToken(token_id=drawn.token_id, sha256=drawn.sha256, call=call, at=at))

    for _ in range(3):
        issue(0.0)
    with pytest.raises(Conflict) as caught:
        issue(0.0)
    assert caught.value.do
    issue(KEEP_ENDED_S + 11)  # what opens nothing is forgotten, and makes room
    assert len(book.tokens()) == 1


@pytest.mark.parametrize("text", ["", "pl_", "\ud800", "é", "pl_" + "0" * 16 + "_" + "A" * 43])
def test_any_text_may_be_asked_about(text):
    assert len(sha256_of(text)) == 64
    with pytest.raises(AccessDenied):
        TokenRegistry().authenticate(text, 0.0)


def test_tokens_are_never_alike():
    drawn = {new_token().text for _ in range(200)}
    assert len(drawn) == 200
    assert all(len(each.split("_", 2)[2]) == 43 for each in drawn), "256 bits"


def test_tokens_and_what_was_spent_survive_a_killed_coordinator(served):
    owner = AccessClient(served.url, served.runtime.secrets.coordinator_token)
    good = owner.create_token(CreateToken(name="good", scopes=(Scope.READ,)))
    bad = owner.create_token(CreateToken(name="bad", scopes=(Scope.READ,)))
    owner.revoke_token(bad.record.token_id)
    spent = owner.create_join_token(CreateJoinToken(worker_id="w-1")).token
    call = JoinWorker(worker_id="w-1", csr=new_request("w-1")[1].decode())
    identity = AccessClient(served.url, spent).join(call)
    served.end(signal.SIGKILL)
    served.start()
    assert CoordinatorClient(served.url, good.token).workers() == []
    for dead in (bad.token, spent):
        with pytest.raises(AccessDenied):
            CoordinatorClient(served.url, dead).workers()
    other = JoinWorker(worker_id="w-1", csr=new_request("w-1")[1].decode())
    with pytest.raises(AccessDenied):
        AccessClient(served.url, spent).join(other)
    assert AccessClient(served.url, identity.token).renew(call).worker_id == "w-1"
