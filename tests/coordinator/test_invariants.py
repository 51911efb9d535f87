"""Whatever happens in whatever order: I4, I5 and I11 hold (shared/FAULTS.md names them).

The machine plays agents, callers, a coordinator that is killed and read back from what it kept,
and messages that come twice or late.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.coordinator.memo import Memo
from paceline.coordinator.messages import (
    DropDeployment,
    KeepDeployment,
    KeepKey,
    KeepPlan,
    KeepReceipt,
    KeepWorker,
    Kept,
    KeptDeployment,
)
from paceline.coordinator.state import CoordinatorState
from paceline.errors import Cancelled, Conflict, DeploymentFailed, NotFound, StaleEpoch
from paceline.wire.records import WorkerStatus
from tests.coordinator.conftest import PIECES, World

WORKERS = st.sampled_from(["n0", "n1", "n2"])
KEYS = st.sampled_from(["k0", "k1"])
VERSIONS = st.sampled_from(["v1", "v2"])
FINAL = ("complete", "failed", "cancelled")


def read_back(kept: list[object]) -> Kept:
    """What a store would give back after committing these effects."""
    deployments: dict[str, KeepDeployment] = {}
    manifests, plans, workers, keys, receipts = {}, {}, {}, {}, {}
    for each in kept:
        if isinstance(each, KeepDeployment):
            deployments[each.deployment.deployment_id] = each
            if each.manifest is not None:
                manifests[each.deployment.deployment_id] = each.manifest
        elif isinstance(each, KeepPlan):
            plans[each.plan.deployment_id] = each.plan
        elif isinstance(each, KeepWorker):
            workers[each.worker.worker_id] = each.worker
        elif isinstance(each, KeepKey):
            keys[each.key] = each
        elif isinstance(each, KeepReceipt):
            receipts[each.receipt.deployment_id, each.receipt.worker_id] = each.receipt
        elif isinstance(each, DropDeployment):
            gone = each.deployment_id
            del deployments[gone]
            keys = {name: key for name, key in keys.items() if key.deployment_id != gone}
    return Kept(
        deployments=tuple(
            KeptDeployment(
                deployment=each.deployment,
                memo=Memo.from_json(each.memo.to_json()),
                manifest=manifests[name],
                plan=plans.get(name),
                receipts=tuple(r for (d, _), r in receipts.items() if d == name),
            )
            for name, each in deployments.items()
        ),
        workers=tuple(workers.values()),
        keys=tuple(keys.values()),
    )


class Fleet(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.world = World()
        self.acknowledged: dict[str, str] = {}  # deployment → its version
        self.by_key: dict[str, tuple[str, str]] = {}
        self.final: dict[str, str] = {}
        self.cancelled: dict[str, tuple[str, ...]] = {}  # with who was complete at that moment
        self.epochs: dict[str, int] = {}
        self.old_beats: list[tuple[str, object, int]] = []

    def any_deployment(self, data):
        return data.draw(st.sampled_from(sorted(self.acknowledged)))

    @initialize(key=KEYS)
    def begin(self, key):
        self.world.register("n0", "n1")
        self.create(key, "v1", 2)

    @rule(worker=WORKERS)
    def register(self, worker):
        self.world.register(worker)

    @rule(worker=WORKERS)
    def old_process_comes_back(self, worker):
        current = self.world.incarnations.get(worker, 0)
        if current < 2:
            return
        before = self.world.state.fleet.find(worker)
        with pytest.raises(StaleEpoch):
            self.world.register(worker, incarnation=current - 1)
        assert self.world.state.fleet.find(worker) == before
        self.world.incarnations[worker] = current

    @rule(key=KEYS, version=VERSIONS, count=st.integers(1, 3))
    def create(self, key, version, count):
        targets = ("n0", "n1", "n2")[:count]
        body = f"{version} {count}"
        try:
            made = self.world.create(*targets, key=key, version=version)
        except Conflict:
            assert self.by_key[key][1] != body
            return
        if key in self.by_key:
            assert self.by_key[key] == (made, body), "the same request made another deployment"
        else:
            assert made not in self.acknowledged
        self.by_key[key] = (made, body)
        self.acknowledged[made] = version

    @precondition(lambda self: self.acknowledged)
    @rule(data=st.data(), worker=WORKERS)
    def fetch_lanes(self, data, worker):
        deployment_id = self.any_deployment(data)
        try:
            lanes = self.world.lanes(deployment_id, worker)
        except (NotFound, Cancelled, DeploymentFailed):
            return
        assert deployment_id not in self.cancelled, "lanes after a cancel"
        assert lanes.epoch <= self.world.epoch(deployment_id), "lanes that did not change are kept"
        part = self.world.state.run(deployment_id).parts[worker]
        assert part.receipt is not None or worker not in self.world.state.run(deployment_id).fresh

    @precondition(lambda self: self.acknowledged)
    @rule(data=st.data(), worker=WORKERS, pieces=st.integers(0, PIECES))
    def receive(self, data, worker, pieces):
        deployment_id = self.any_deployment(data)
        if worker not in self.world.incarnations:
            return
        entry = self.world.entry(deployment_id, worker, pieces)
        self.old_beats.append((worker, entry, self.world.incarnations[worker]))
        self.world.beat(worker, entry)

    @precondition(lambda self: self.acknowledged)
    @rule(data=st.data(), worker=WORKERS)
    def finish(self, data, worker):
        deployment_id = self.any_deployment(data)
        if worker not in self.world.incarnations:
            return
        entry = self.world.entry(
            deployment_id,
            worker,
            PIECES,
            status=WorkerStatus.COMPLETE,
            receipt=self.world.receipt(deployment_id, worker),
        )
        self.old_beats.append((worker, entry, self.world.incarnations[worker]))
        self.world.beat(worker, entry)

    @precondition(lambda self: self.old_beats)
    @rule(data=st.data())
    def duplicate(self, data):
        worker, entry, incarnation = data.draw(st.sampled_from(self.old_beats))
        run = self.world.state.run(entry.deployment_id)
        before = run.parts.get(worker)
        before = (before.pieces_held, before.receipt) if before else None
        answer = self.world.beat(worker, entry, incarnation=incarnation)
        if incarnation < self.world.incarnations[worker]:
            after = run.parts.get(worker)
            after = (after.pieces_held, after.receipt) if after else None
            assert answer.go_on is False
            assert after == before, "an older incarnation reported"

    @precondition(lambda self: self.acknowledged)
    @rule(data=st.data())
    def cancel(self, data):
        deployment_id = self.any_deployment(data)
        try:
            self.world.cancel(deployment_id)
        except Conflict:
            assert self.world.status(deployment_id) == "complete"
            return
        if self.world.status(deployment_id) == "cancelled":
            complete = self.world.state.view(deployment_id).workers_complete
            self.cancelled.setdefault(deployment_id, complete)

    @precondition(lambda self: self.acknowledged)
    @rule(data=st.data())
    def activate(self, data):
        deployment_id = self.any_deployment(data)
        try:
            self.world.activate(deployment_id)
        except Conflict:
            assert self.world.status(deployment_id) != "complete"

    @rule(seconds=st.sampled_from([0.25, 1.0, 4.0, 70.0]), silent=st.sets(WORKERS))
    def wait(self, seconds, silent):
        self.world.silent = {each for each in silent if each in self.world.incarnations}
        self.world.wait(seconds)
        self.world.silent = set()

    @rule()
    def coordinator_is_killed_and_resumes(self):
        world = self.world
        kept = read_back(world.kept)
        before = {each.deployment_id: each.epoch for each in world.state.deployments()}
        world.state = CoordinatorState.restore(kept, world.now_s, world.patience)
        after = {each.deployment_id: each.epoch for each in world.state.deployments()}
        assert after == before

    @invariant()
    def acknowledged_deployments_are_kept_once(self):
        known = [each.deployment_id for each in self.world.state.deployments()]
        assert sorted(known) == sorted(self.acknowledged)

    @invariant()
    def final_is_final_and_a_cancel_is_never_published(self):
        for each in self.world.state.deployments():
            status = each.status.value
            was = self.final.get(each.deployment_id)
            assert was is None or was == status
            if status in FINAL:
                self.final[each.deployment_id] = status
        for deployment_id, complete in self.cancelled.items():
            assert self.world.status(deployment_id) == "cancelled"
            assert self.world.state.view(deployment_id).workers_complete == complete
            assert not any(part.activated for part in self.world.state.progress(deployment_id))

    @invariant()
    def epochs_only_grow(self):
        for each in self.world.state.deployments():
            assert each.epoch >= self.epochs.get(each.deployment_id, 0)
            self.epochs[each.deployment_id] = each.epoch

    @invariant()
    def complete_means_every_needed_receipt(self):
        for each in self.world.state.deployments():
            if each.status.value == "complete":
                view = self.world.state.view(each.deployment_id)
                assert set(view.workers_complete) == set(each.target_workers)


Fleet.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
TestFleet = Fleet.TestCase
