"""Whatever is kept in whatever order: both coordination backends give back the same."""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.coordinator.state.messages import (
    DropDeployment,
    DropToken,
    DropWorker,
    SaveIdempotencyKey,
)
from paceline.coordinator.stores import Candidate
from paceline.coordinator.stores.sqlite import SqliteCoordination
from tests.coordinator.stores.conftest import REAL
from tests.coordinator.stores.effects import (
    DIGEST,
    deployment,
    expected,
    plan,
    receipt,
    token,
    told,
    worker,
)

deployments = st.sampled_from(["d0", "d1", "d/2 ü"])
workers = st.sampled_from(["w0", "w1", "w.2"])
numbers = st.integers(1, 9)
effects = st.one_of(
    st.builds(worker, workers, numbers),
    st.builds(DropWorker, workers),
    st.builds(deployment, deployments, st.sampled_from(["v1", "v2"]), st.sampled_from([8, 9_000])),
    st.builds(deployment, deployments, new=st.just(False), epoch=numbers),
    st.builds(DropDeployment, deployments),
    st.builds(plan, deployments, numbers),
    st.builds(receipt, deployments, workers, numbers.map(float)),
    st.builds(token, st.sampled_from(["t0", "t1"]), numbers.map(float)),
    st.builds(DropToken, st.sampled_from(["t0", "t1"])),
    st.builds(lambda d, n: SaveIdempotencyKey(f"{d}:{n}", DIGEST, d), deployments, numbers),
    st.builds(told, numbers),
)


def sensible(commits):
    """What the coordinator would ask for: a manifest comes with a deployment's first record."""
    there = set()
    for commit in commits:
        kept = []
        for each in commit:
            match each:
                case DropDeployment(name):
                    there.discard(name)
                case _ if hasattr(each, "manifest"):
                    name = each.deployment.deployment_id
                    if (each.manifest is None) != (name in there):
                        continue
                    there.add(name)
            kept.append(each)
        yield kept


@REAL
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    commits=st.lists(st.lists(effects, max_size=12), max_size=8),
    terms=st.lists(st.integers(0, 7), max_size=2),
)
def test_the_same_commits_leave_the_same_behind(etcd, tmp_path_factory, commits, terms):
    stores = [
        SqliteCoordination(tmp_path_factory.mktemp("same") / "c.sqlite"),
        etcd.open(),
    ]
    try:
        names = itertools.count()
        candidate = Candidate(f"r{next(names)}", "u")
        held = [each.campaign(candidate, lambda: False) for each in stores]
        kept, told_by = [], [[], []]
        for number, commit in enumerate(sensible(commits)):
            if number in terms:
                for store, term in zip(stores, held, strict=True):
                    store.resign(term)
                held = [each.campaign(candidate, lambda: False) for each in stores]
            kept += commit
            for which, (store, term) in enumerate(zip(stores, held, strict=True)):
                told_by[which] += store.commit(term, commit)
        first, second = (each.load(0.0) for each in stores)
        assert first == second == expected(kept)
        assert told_by[0] == told_by[1]
        assert stores[0].events_after(0, 1_000) == stores[1].events_after(0, 1_000) == told_by[0]
        assert stores[0].outbox() == stores[1].outbox()
        assert held[0].epoch == held[1].epoch
    finally:
        for each in stores:
            each.close()
