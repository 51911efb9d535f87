"""The checker of histories finds every kind of lie, and believes what can be true."""

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.leaders.history import Final, History, Invocation, violations


def did(kind, key, outcome="acknowledged", at=1.0, **more):
    return Invocation(kind=kind, key=key, began_s=at, ended_s=at + 0.5, outcome=outcome, **more)


HISTORY = [
    did("create", "k1", "unknown", 1.0),
    did("create", "k1", at=2.0, answer="d1"),
    did("create", "k1", at=3.0, answer="d1"),
    did("create", "k2", "unknown", 1.0),
    did("create", "k3", at=1.0, answer="d3"),
    did("create", "k4", "refused", 1.0),
    did("cancel", "d3", "unknown", 2.0),
    did("cancel", "d3", at=3.0),
    did("register", "w", at=1.0, value=1),
    did("register", "w", "unknown", 2.0, value=2),
    did("put", "s", at=1.0, value=1),
    did("put", "s", at=2.0, value=2),
    did("put", "s", "unknown", 3.0, value=3),
    did("beat", "w", at=1.0, epoch=1),
    did("beat", "v", at=1.2, epoch=2),
    did("beat", "w", at=2.0, epoch=2),
]
FINAL = Final(
    deployments=(("d1", "k1", "init"), ("d3", "k3", "cancelled")),
    incarnations={"w": 2},
    ledger={"s": 3},
    created=Counter(d1=1, d3=1),
)


def test_what_can_be_true_is_believed():
    assert violations(HISTORY, FINAL) == []
    unknown_happened = replace(
        FINAL,
        deployments=(*FINAL.deployments, ("d2", "k2", "init")),
        created=Counter(d1=1, d2=1, d3=1),
        ledger={"s": 2},
        incarnations={"w": 1},
    )
    assert violations(HISTORY, unknown_happened) == []


@pytest.mark.parametrize(
    ("lie", "word"),
    [
        ({"deployments": FINAL.deployments[:1], "created": Counter(d1=1)}, "lost"),
        ({"deployments": (*FINAL.deployments, ("d9", "k1", "init"))}, "2 times"),
        ({"deployments": (("d8", "k1", "init"), FINAL.deployments[1])}, "answered with"),
        ({"deployments": (*FINAL.deployments, ("d4", "k4", "init"))}, "refused"),
        ({"deployments": (*FINAL.deployments, ("d5", "k5", "init"))}, "nobody asked"),
        ({"created": Counter(d1=2, d3=1)}, "told of 2"),
        ({"created": Counter(d1=1)}, "told of 0"),
        ({"created": Counter(d1=1, d3=1, d7=1)}, "not there"),
        ({"deployments": (FINAL.deployments[0], ("d3", "k3", "init"))}, "after its cancel"),
        ({"deployments": (("d1", "k1", "cancelled"), FINAL.deployments[1])}, "nobody asked"),
        ({"incarnations": {"w": 3}}, "incarnation 3"),
        ({"incarnations": {}}, "incarnation 0"),
        ({"ledger": {"s": 1}}, "ledger s is 1"),
        ({"ledger": {}}, "lost"),
    ],
)
def test_every_kind_of_lie_is_found(lie, word):
    found = violations(HISTORY, replace(FINAL, **lie))
    assert any(word in each for each in found), found


def test_two_answers_to_one_key_and_answers_of_an_older_leader_are_found():
    two = [*HISTORY, did("create", "k1", at=9.0, answer="d9")]
    assert any("several" in each for each in violations(two, FINAL))
    old = [*HISTORY, did("beat", "v", at=9.0, epoch=1)]
    assert any("epoch 1 after epoch 2" in each for each in violations(old, FINAL))


def test_history_counts_its_recorded_calls():
    history = History()
    for each in HISTORY:
        history.add(each)
    assert history.counts()["create unknown"] == 2
    assert [each.ended_s for each in history.all()] == sorted(each.ended_s for each in HISTORY)
