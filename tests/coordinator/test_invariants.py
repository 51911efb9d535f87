"""Whatever happens in whatever order: I4, I5, I11 and I12 hold (``fleet_model`` says how).

The model can fail: each bug that is planted here in production code is caught.
"""

import logging
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from paceline.coordinator import Coordinator
from paceline.coordinator.state import (
    ActivationManager,
    DeploymentIndex,
    agent_handlers,
    deployment_index,
    state,
)
from tests.coordinator.fleet_model import Fleet


def bounded(examples, steps, **more):
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
        **more,
    )


@pytest.mark.parametrize("examples", [4, pytest.param(60, marks=pytest.mark.nightly)])
@pytest.mark.timeout(300)
def test_invariants_hold_in_any_order_of_events(examples):
    # Without shrinking, which takes minutes: a failure prints its steps.
    run_state_machine_as_test(Fleet, settings=bounded(examples, 40, phases=[Phase.generate]))


def keys_are_forgotten(patch):
    patch.setattr(DeploymentIndex, "known_key", lambda *_: None)


def state_runs_ahead_of_what_was_kept(patch):
    def undo(self, term, error):
        return error

    patch.setattr(Coordinator, "_commit_failed", undo)


def cancel_is_acknowledged_when_it_is_told(patch):
    original = agent_handlers._command_for

    def command(book, run, worker_id, moving):
        if run.deployment.status.value == "cancelled":
            run.parts[worker_id].stopped = True
            run.parts[worker_id].command_sent = True
            return None
        return original(book, run, worker_id, moving)

    patch.setattr(agent_handlers, "_command_for", command)


def nobody_has_to_be_ready(patch):
    patch.setattr(ActivationManager, "_is_ready", lambda *_: True)


def rollback_goes_all_the_way_back(patch):
    history = DeploymentIndex.history
    beneath = ActivationManager._previous

    def oldest(self, run):
        patch.setattr(DeploymentIndex, "history", lambda book, model: history(book, model)[::-1])
        try:
            return beneath(self, run)
        finally:
            patch.setattr(DeploymentIndex, "history", history)

    patch.setattr(ActivationManager, "_previous", oldest)


def what_lies_beneath_is_forgotten(patch):
    patch.setattr(deployment_index, "_needed", lambda book: set())


def leader_of_an_older_epoch_answers(patch):
    original = Coordinator._commit

    def commit(self, term, effects):
        return original(self, replace(term, epoch=self._coordination.epoch), effects)

    patch.setattr(Coordinator, "_commit", commit)


def receipts_are_lost_with_the_leader(patch):
    original = state._restored

    def restored(kept, settings):
        return original(replace(kept, receipts=()), settings)

    patch.setattr(state, "_restored", restored)


BUGS = [
    keys_are_forgotten,
    state_runs_ahead_of_what_was_kept,
    cancel_is_acknowledged_when_it_is_told,
    nobody_has_to_be_ready,
    rollback_goes_all_the_way_back,
    what_lies_beneath_is_forgotten,
    leader_of_an_older_epoch_answers,
    receipts_are_lost_with_the_leader,
]


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bug_is_caught(bug, monkeypatch):
    logging.disable(logging.CRITICAL)
    bug(monkeypatch)
    try:
        with pytest.raises((AssertionError, KeyError)):  # the account's, or the lists' own
            # Found is enough; the shortest way there is not searched.
            run_state_machine_as_test(Fleet, settings=bounded(400, 50, phases=(Phase.generate,)))
    finally:
        logging.disable(logging.NOTSET)
