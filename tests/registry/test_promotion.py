"""Aliases name only what passed its gate, and a kill at any step can be completed or undone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from paceline.errors import (
    AccessDenied,
    Cancelled,
    Conflict,
    GateRefused,
    InvalidInput,
    NotFound,
    ServiceUnavailable,
)
from paceline.registry import TAG_MANIFEST, Registry, evidence_path, resolve_version
from paceline.schemas import Evidence, GateDecision, digest_of
from tests.registry.bundles import digest, make_evidence
from tests.support.web import asking_for

pytestmark = pytest.mark.xdist_group("prefect")  # one server
_names = itertools.count(1)


class Crash(BaseException):
    """What a kill looks like from inside: nothing may catch it."""


class CrashingClient:
    """Passes calls on to ``inner`` and dies after the ``at``-th one that writes.

    Dying before a write, or at a read, leaves what dying after the write before it leaves.
    """

    def __init__(self, inner: Any, at: int) -> None:
        self.inner, self.at, self.calls = inner, at, 0

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not method.startswith(("set_", "delete_", "create_", "log_")):
                return getattr(self.inner, method)(*args, **kwargs)
            self.calls += 1
            answer = getattr(self.inner, method)(*args, **kwargs)
            if self.calls == self.at:
                raise Crash
            return answer

        return call


class Story:
    """A model of its own in the registry, with ``count`` registered candidates."""

    def __init__(self, registry: Registry, count: int, owner: str = "") -> None:
        self.registry = registry
        self.model_id = f"{owner}bytelm-{next(_names)}"
        self.evidence: dict[str, Evidence] = {}
        run = registry.ensure_run(f"run of {self.model_id}", experiment="promotion tests")
        for number in range(1, count + 1):
            evidence = make_evidence(self.model_id, str(number))
            url = f"s3://paceline/models/{self.model_id}/v{number}"
            version = registry.register_candidate(self.model_id, url, evidence, run)
            self.evidence[version] = evidence

    def promote(self, version: str, registry: Registry | None = None) -> Any:
        return (registry or self.registry).promote(self.model_id, version, self.evidence[version])

    def aliases(self) -> tuple[str | None, str | None]:
        found = self.registry.call("get_registered_model", self.model_id).aliases
        return found.get("champion"), found.get("previous")


def test_promotion_moves_the_champion_and_remembers_the_one_before(registry: Registry) -> None:
    story = Story(registry, 2)
    assert registry.champion(story.model_id) is None
    first, second = story.promote("1"), story.promote("2")
    assert (first.version, first.previous_version) == ("1", None)
    assert (second.version, second.previous_version) == ("2", "1")
    champion = registry.champion(story.model_id)
    assert champion is not None
    assert champion.evidence == story.evidence["2"]
    assert champion.published_version == "v2"
    assert second.evidence_digest == digest_of(story.evidence["2"])
    assert story.promote("2") == second, "promoting twice changes nothing"
    assert story.aliases() == ("2", "1")


def test_rollback_restores_the_previous_champion_once(registry: Registry) -> None:
    story = Story(registry, 2)
    for version in ("1", "2"):
        story.promote(version)
    back = registry.rollback(story.model_id, from_version="2")
    assert (back.version, back.previous_version) == ("1", None)
    assert registry.rollback(story.model_id, from_version="2") == back
    with pytest.raises(NotFound, match=r"no previous champion.*v1 \(version 1 in MLflow\)"):
        registry.rollback(story.model_id)
    again = story.promote("2")
    assert (again.version, again.previous_version) == ("2", "1")


def test_what_was_retracted_is_known_until_it_is_champion_again(registry: Registry) -> None:
    story = Story(registry, 2)

    def is_back(version: str) -> bool:
        return registry.was_rolled_back(story.model_id, story.evidence[version].manifest_digest)

    story.promote("1")
    assert not is_back("1")
    for _ in range(2):
        registry.retract(story.model_id, "1")
        assert story.aliases() == (None, None), "the first champion leaves none"
    assert (is_back("1"), is_back("2")) == (True, False)
    with pytest.raises(NotFound, match="no champion"):
        registry.rollback(story.model_id)
    story.promote("1")
    assert not is_back("1")
    story.promote("2")
    registry.retract(story.model_id, "2", by_person=False)  # a transaction failed
    assert story.aliases() == ("1", None)
    assert not is_back("2"), "it may be promoted again"


@pytest.mark.parametrize("way_out", ["completed", "retracted", "rolled back"])
def test_killed_promotion_is_completed_or_undone(
    registry: Registry, near: Registry, way_out: str
) -> None:
    """Fault 24: at every write to the registry, then each way out."""
    story = Story(registry, 3)
    story.promote("1", near)
    story.promote("2", near)
    if way_out == "completed":  # more writes: binding
        story.evidence["3"] = story.evidence["3"].model_copy(update={"approver": "ada"})
    for step in itertools.count(1):
        client = CrashingClient(near._client, step)
        dying = Registry(near.tracking_uri, client=client)
        try:
            story.promote("3", dying)
        except Crash:
            pass
        else:
            assert step > 3, "the crash was never injected"
            break
        champion = near.champion(story.model_id)
        assert champion is not None
        assert champion.version in ("2", "3"), f"step {step}"
        if way_out == "completed":
            done = story.promote("3", near)
            assert (done.version, done.previous_version) == ("3", "2"), f"step {step}"
        if way_out == "rolled back":
            back = near.rollback(story.model_id, from_version="3")
            assert (back.version, back.previous_version) == ("2", "1"), f"step {step}"
        near.retract(story.model_id, "3")
        assert story.aliases() == ("2", "1"), f"step {step}"


def test_killed_rollback_is_completed_by_the_next(registry: Registry, near: Registry) -> None:
    story = Story(registry, 3)
    for version in ("1", "2"):
        story.promote(version, near)
    for step in itertools.count(1):
        story.promote("3", near)
        client = CrashingClient(near._client, step)
        dying = Registry(near.tracking_uri, client=client)
        try:
            dying.rollback(story.model_id, from_version="3")
        except Crash:
            pass
        else:
            assert step > 2, "the crash was never injected"
            break
        back = near.rollback(story.model_id, from_version="3")
        assert (back.version, back.previous_version) == ("2", "1"), f"step {step}"


def test_a_refused_candidate_gets_no_alias_and_no_promotion(registry: Registry) -> None:
    story = Story(registry, 0)
    evidence = make_evidence(story.model_id, "bad", passed=False)
    run = registry.ensure_run("run of refused", experiment="promotion tests")
    version = registry.register_candidate(
        story.model_id, "s3://paceline/models/x/v9", evidence, run
    )
    assert registry.call("get_registered_model", story.model_id).aliases == {}
    with pytest.raises(GateRefused, match="better than base"):
        registry.promote(story.model_id, version, evidence)
    assert story.aliases() == (None, None)


def test_only_the_bound_evidence_promotes(registry: Registry) -> None:
    story = Story(registry, 2)
    ours = story.evidence["1"]
    nothing_checked = ours.model_copy(update={"gate": GateDecision(passed=True, checks=())})
    for forged, told in (
        (ours.model_copy(update={"manifest_digest": digest("other bytes")}), "another manifest"),
        (ours.model_copy(update={"job_id": "another-job"}), "another evidence"),
        (ours.model_copy(update={"model_id": "another"}), "another model"),
        (ours.model_copy(update={"weights_digest": digest("others")}), "another set of weights"),
        (ours.model_copy(update={"snapshot_digest": digest("other data")}), "another snapshot"),
        (story.evidence["2"], "another manifest"),
        (nothing_checked, "did not pass"),
    ):
        with pytest.raises(GateRefused, match=told):
            registry.promote(story.model_id, "1", forged)
    registry.call("set_model_version_tag", story.model_id, "1", TAG_MANIFEST, digest("swapped"))
    with pytest.raises(GateRefused, match="another manifest"):
        story.promote("1")
    assert story.aliases() == (None, None)


def test_tampered_evidence_is_refused_and_a_champion_of_it_is_not_trusted(
    registry: Registry,
) -> None:
    story = Story(registry, 2)
    story.promote("2")
    for version in ("1", "2"):
        found = registry.version(story.model_id, version)
        forged = story.evidence[version].model_copy(update={"approver": "nobody"})
        registry.log_artifact_text(
            found.mlflow_run_id, forged.model_dump_json(), evidence_path(found.evidence_digest)
        )
    with pytest.raises(GateRefused, match=r"cannot be trusted.*changed after it was bound"):
        story.promote("1")
    with pytest.raises(GateRefused, match="changed after it was bound"):
        registry.champion(story.model_id)


def test_an_alias_set_by_hand_makes_no_champion(registry: Registry) -> None:
    story = Story(registry, 0)
    registry._ensure_model(story.model_id)
    registry.call("create_model_version", story.model_id, "s3://paceline/x", await_creation_for=0)
    registry.call("set_registered_model_alias", story.model_id, "champion", "1")
    with pytest.raises(GateRefused, match=r"x \(version 1 in MLflow\) has no evidence"):
        registry.champion(story.model_id)


def test_an_approver_may_sign_later_but_not_be_replaced(registry: Registry) -> None:
    story = Story(registry, 1)
    signed = story.evidence["1"].model_copy(update={"approver": "ada"})
    promotion = registry.promote(story.model_id, "1", signed)
    assert promotion.evidence_digest == digest_of(signed)
    assert registry.evidence(story.model_id, "1").approver == "ada"
    for approver in ("eve", None):
        other = signed.model_copy(update={"approver": approver})
        with pytest.raises(GateRefused, match="somebody else approved"):
            registry.promote(story.model_id, "1", other)
    run = registry.version(story.model_id, "1").mlflow_run_id
    url = f"s3://paceline/models/{story.model_id}/v1"
    assert registry.register_candidate(story.model_id, url, story.evidence["1"], run) == "1"


def test_a_cancelled_run_promotes_nothing_and_two_promoters_are_told(registry: Registry) -> None:
    story = Story(registry, 2)
    story.promote("1")

    def cancelled() -> None:
        raise Cancelled("the run was cancelled")

    def meanwhile() -> None:
        registry.call("set_registered_model_alias", story.model_id, "previous", "2")

    with pytest.raises(Cancelled):
        registry.promote(story.model_id, "2", story.evidence["2"], guard=cancelled)
    assert story.aliases()[0] == "1"
    registry.retract(story.model_id, "2")
    assert story.aliases() == ("1", None)
    with pytest.raises(Conflict, match="somebody else moved"):
        registry.promote(story.model_id, "2", story.evidence["2"], guard=meanwhile)


def test_a_version_says_what_it_is_and_registering_again_finds_it(registry: Registry) -> None:
    story = Story(registry, 1)
    found = registry.call("get_model_version", story.model_id, "1")
    assert found.source == f"s3://paceline/models/{story.model_id}/v1"
    assert f", published at {found.source} " in found.description
    run = registry.call("get_run", found.run_id)
    experiment = registry.call("get_experiment", run.info.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    assert "one for each lifecycle" in experiment.tags["mlflow.note.content"]
    again = (story.evidence["1"], found.run_id)
    assert registry.register_candidate(story.model_id, found.source, *again) == "1"
    with pytest.raises(Conflict, match="other bytes"):
        registry.register_candidate(story.model_id, found.source + "0", *again)
    with pytest.raises(InvalidInput, match="another model"):
        registry.register_candidate("elsewhere", found.source, *again)


def test_addresses_resolve_to_published_bytes(registry: Registry) -> None:
    """By the model's own id, although MLflow's names have no slash."""
    story = Story(registry, 1, "acme/")
    story.promote("1")
    url, wanted = f"s3://paceline/models/{story.model_id}/v1", story.evidence["1"].manifest_digest
    for selector in ("@champion", "@candidate", "/1"):
        uri = f"models:/{story.model_id}{selector}"
        assert resolve_version(uri, registry.tracking_uri) == (url, wanted)
    found = registry.by_manifest(story.model_id, wanted)
    assert found is not None
    assert found.version == "1"
    assert registry.by_manifest(story.model_id, digest("nothing")) is None
    for missing in (
        f"models:/{story.model_id}@nobody",
        f"models:/{story.model_id}/99",
        "models:/no-such@champion",
    ):
        with pytest.raises(NotFound):
            resolve_version(missing, registry.tracking_uri)
    for malformed in (
        story.model_id,
        f"models:/{story.model_id}",
        "runs:/abc@x",
        "models:/@champion",
    ):
        with pytest.raises(InvalidInput):
            resolve_version(malformed, registry.tracking_uri)
    with pytest.raises(InvalidInput, match="no MLflow server"):
        resolve_version(f"models:/{story.model_id}@champion", "")
    with pytest.raises(ServiceUnavailable):
        resolve_version(f"models:/{story.model_id}@champion", "http://127.0.0.1:9")


def test_a_server_elsewhere_has_the_credentials_of_mlflows_own_clients(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(registry, 1)
    for name in ("TOKEN", "USERNAME", "PASSWORD"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    for asked, variables in (
        ("Bearer a-token", {"TOKEN": "a-token"}),
        ("Basic dXNlcjpwYXNz", {"USERNAME": "user", "PASSWORD": "pass"}),
    ):
        with asking_for(asked, registry.tracking_uri) as guarded, monkeypatch.context() as given:
            with pytest.raises(AccessDenied):
                resolve_version(f"models:/{story.model_id}/1", guarded.url)
            for name, value in variables.items():
                given.setenv(f"MLFLOW_TRACKING_{name}", value)
            url, _ = resolve_version(f"models:/{story.model_id}/1", guarded.url)
            own = Registry(guarded.url)
            assert own.rest("GET", "/experiments/get-by-name?experiment_name=Default")
            assert own.version(story.model_id, "1").source_url == url, "by MLflow's client"


def test_the_newest_version_of_a_training_is_found(registry: Registry) -> None:
    story = Story(registry, 1, owner="acme/")
    run = registry.ensure_run("run-20261120-153600-9f3a1c", experiment=story.model_id)
    again = story.evidence["1"].model_copy(update={"snapshot_digest": digest("another exam")})
    registry.register_candidate(story.model_id, "s3://b/again", again, run)
    training = story.evidence["1"].job_id
    page = registry.page_of_training(story.model_id, training)
    assert page == registry.model_url(story.model_id, "2")
    assert registry.page_of_training("acme/none", training) == ""
    for other in ("job-none", "job-' or name = 'x"):
        assert registry.page_of_training(story.model_id, other) == ""
