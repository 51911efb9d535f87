"""What a node reports at once, and not with its next heartbeat."""

from __future__ import annotations

from paceline.relay import ActiveDeployment
from tests.relay.kit import ORIGIN, lanes, paper_manifest

KIB = 1024


def active_deployment(report_every: int) -> ActiveDeployment:
    manifest = paper_manifest(64, KIB)
    mine = lanes("me", manifest, ORIGIN).model_copy(update={"origin_tell_bytes": report_every})
    made = ActiveDeployment(mine, manifest, 0.0, 0)
    made.refresh(0.0)
    return made


def test_much_read_from_the_origin_is_reported_at_once() -> None:
    seed = active_deployment(4 * KIB)
    before = seed.reported_at_once()
    seed.counters.add(origin=3 * KIB)
    assert not seed.origin_report_due
    seed.counters.add(origin=1 * KIB)
    assert seed.origin_report_due
    seed.refresh(0.1)
    assert seed.reported_at_once() != before
    assert not seed.origin_report_due


def test_a_node_without_a_threshold_waits_for_its_heartbeat() -> None:
    other = active_deployment(0)
    before = other.reported_at_once()
    other.counters.add(origin=60 * KIB)
    assert not other.origin_report_due
    other.refresh(0.1)
    assert other.reported_at_once() == before
