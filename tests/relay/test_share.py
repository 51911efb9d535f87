"""What a node tells at once, and not with its next beat."""

from __future__ import annotations

from paceline.relay import ActiveDeployment
from tests.relay.kit import ORIGIN, lanes, paper_manifest

KIB = 1024


def share(tell: int) -> ActiveDeployment:
    manifest = paper_manifest(64, KIB)
    mine = lanes("me", manifest, ORIGIN).model_copy(update={"origin_tell_bytes": tell})
    made = ActiveDeployment(mine, manifest, 0.0, 0)
    made.refresh(0.0)
    return made


def test_much_read_from_the_origin_is_told_at_once() -> None:
    seed = share(4 * KIB)
    before = seed.news()
    seed.counters.add(origin=3 * KIB)
    assert not seed.origin_report_due
    seed.counters.add(origin=1 * KIB)
    assert seed.origin_report_due
    seed.refresh(0.1)
    assert seed.news() != before
    assert not seed.origin_report_due


def test_nobody_else_tells_of_it() -> None:
    other = share(0)
    before = other.news()
    other.counters.add(origin=60 * KIB)
    assert not other.origin_report_due
    other.refresh(0.1)
    assert other.news() == before
