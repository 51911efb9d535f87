"""The machine of ``fleet_model`` can fail: each bug planted here in production code is caught."""

import logging

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.state import agent_handlers as answers
from paceline.coordinator.state import deployment_index as pruning
from paceline.coordinator.state.activation import ActivationManager
from paceline.coordinator.state.deployment import DeploymentState
from paceline.coordinator.state.deployment_index import DeploymentIndex
from paceline.coordinator.state.membership import Membership
from paceline.coordinator.state.persisted_state import PersistedState
from paceline.coordinator.state.state import CoordinatorState
from tests.coordinator.fleet_model import Fleet

SEARCH = settings(
    max_examples=400,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
    phases=(Phase.generate,),  # found is enough; the shortest way there is not asked for
)


def keys_are_forgotten(patch):
    patch.setattr(DeploymentIndex, "known_key", lambda *_: None)


def keys_are_not_compared(patch):
    patch.setattr(
        DeploymentIndex, "known_key", lambda self, key, _: self.find(k.deployment_id)
        if (k := self.keys.get(key)) else None,
    )  # fmt: skip


def state_runs_ahead_of_what_was_kept(patch):
    def undo(self, term, error):
        return error

    patch.setattr(Coordinator, "_undo", undo)


def older_incarnation_is_heard(patch):
    original = Membership.hear

    def hear(self, beat, at, now_s):
        member = self._members.get(beat.worker_id)
        if member is not None:
            beat = beat.model_copy(update={"incarnation": member.registered.incarnation})
        return original(self, beat, at, now_s)

    patch.setattr(Membership, "hear", hear)


def replayed_beat_counts(patch):
    patch.setattr(Membership, "is_overtaken", lambda *_: False)


def cancel_is_acknowledged_when_it_is_told(patch):
    original = answers._command_for

    def command(book, run, worker_id, moving):
        if run.deployment.status.value == "cancelled":
            run.parts[worker_id].stopped = True
            run.parts[worker_id].command_sent = True
            return None
        return original(book, run, worker_id, moving)

    patch.setattr(answers, "_command_for", command)


def cancelled_deployment_goes_on(patch):
    patch.setattr(DeploymentState, "final", property(lambda run: False))


def nobody_has_to_be_ready(patch):
    patch.setattr(ActivationManager, "_is_ready", lambda *_: True)


def quorum_is_one(patch):
    patch.setattr(ActivationManager, "_quorum", lambda *_: 1)


def rollback_goes_all_the_way_back(patch):
    history = DeploymentIndex.history
    beneath = ActivationManager._beneath

    def oldest(self, run):
        patch.setattr(DeploymentIndex, "history", lambda book, model: history(book, model)[::-1])
        try:
            return beneath(self, run)
        finally:
            patch.setattr(DeploymentIndex, "history", history)

    patch.setattr(ActivationManager, "_beneath", oldest)


def history_of_activations_is_not_kept(patch):
    original = PersistedState.to_json

    def lossy(self):
        from dataclasses import replace

        return original(replace(self, number=0))

    patch.setattr(PersistedState, "to_json", lossy)


def what_lies_beneath_is_forgotten(patch):
    patch.setattr(pruning, "_needed", lambda book: set())


def nothing_is_ever_forgotten(patch):
    patch.setattr(pruning, "_closed_for_s", lambda *_: 0.0)
    patch.setattr(pruning, "AT_ONCE", 0)


def leader_of_an_older_epoch_answers(patch):
    patch.setattr(CoordinatorState, "restore", CoordinatorState.restore)
    original = Coordinator._commit

    def commit(self, term, effects):
        from paceline.coordinator.stores.contracts import Term

        newest = Term(self._coordination.epoch, term.replica_id, term.url)
        return original(self, newest, effects)

    patch.setattr(Coordinator, "_commit", commit)


def receipts_are_lost_with_the_leader(patch):
    from paceline.coordinator.state import state

    original = state._restored

    def restored(kept, patience):
        from dataclasses import replace

        return original(replace(kept, receipts=()), patience)

    patch.setattr(state, "_restored", restored)


def deadlines_begin_anew_with_each_leader(patch):
    from dataclasses import replace

    from paceline.coordinator.state import state

    original = state._restored

    def restored(kept, patience):
        run = original(kept, patience)
        run.memo = replace(run.memo, created_s=10**9)
        return run

    patch.setattr(state, "_restored", restored)


BUGS = [
    keys_are_forgotten,
    keys_are_not_compared,
    state_runs_ahead_of_what_was_kept,
    older_incarnation_is_heard,
    pytest.param(replayed_beat_counts, marks=pytest.mark.chaos),  # takes ten seconds to find
    cancel_is_acknowledged_when_it_is_told,
    cancelled_deployment_goes_on,
    nobody_has_to_be_ready,
    quorum_is_one,
    rollback_goes_all_the_way_back,
    history_of_activations_is_not_kept,
    what_lies_beneath_is_forgotten,
    nothing_is_ever_forgotten,
    leader_of_an_older_epoch_answers,
    receipts_are_lost_with_the_leader,
    pytest.param(deadlines_begin_anew_with_each_leader, marks=pytest.mark.chaos),  # likewise
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bug_is_caught(bug, monkeypatch):
    logging.disable(logging.CRITICAL)
    bug(monkeypatch)
    try:
        with pytest.raises((AssertionError, KeyError)):  # the account's, or the lists' own
            run_state_machine_as_test(Fleet, settings=SEARCH)
    finally:
        logging.disable(logging.NOTSET)
