"""Each model id has a registered model of its own, and answers for no other's versions."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import Profile
from paceline.errors import Conflict, GateRefused, InvalidInput, NotFound
from paceline.manifest import build_manifest
from paceline.registry import Registry, resolve_source, resolve_version
from paceline.registry.lineage import registered_name
from paceline.schemas import MODEL_ID, Evidence
from tests.registry.bundles import make_evidence

pytestmark = pytest.mark.xdist_group("prefect")  # one server
MLFLOW_REFUSES = re.compile(r"[/:]|\.\.")


def test_no_two_ids_share_a_name_and_names_without_two_hyphens_stay() -> None:
    texts = (
        "".join(each) for size in range(1, 8) for each in itertools.product("a-/", repeat=size)
    )
    ids = [each for each in texts if re.fullmatch(MODEL_ID, each)]
    names = {registered_name(each) for each in ids}
    assert len(names) == len(ids) > 250
    assert not [each for each in names if MLFLOW_REFUSES.search(each)]
    assert all(registered_name(each) == each.replace("/", "--") for each in ids if "--" not in each)
    assert registered_name("acme--tiny") != registered_name("acme/tiny") == "acme--tiny"


def test_a_name_copied_from_mlflow_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidInput, match="the name being the model's id"):
        resolve_version("models:/acme~~tiny@champion", "http://127.0.0.1:9")


@pytest.fixture
def runtime(registry: Registry, tmp_path: Path) -> Any:
    return SimpleNamespace(
        profile=Profile.model_validate({"name": "names"}),
        state_dir=tmp_path,
        endpoints=SimpleNamespace(mlflow_url=registry.tracking_uri),
        secrets=SimpleNamespace(mlflow_auth=""),
    )


def published(directory: Path, model_id: str, version: str) -> tuple[str, Evidence]:
    """Return where a model of ``model_id`` lies, and evidence that it passed its gate."""
    place = directory / model_id / version
    place.mkdir(parents=True)
    (place / "w.bin").write_bytes(model_id.encode())
    made = build_manifest(place, model_id=model_id, version=version, link_mbit=1000.0)
    (place / "manifest.json").write_bytes(made.to_bytes())
    evidence = make_evidence(model_id, version)
    return str(place), evidence.model_copy(update={"manifest_digest": made.digest})


def promoted(registry: Registry, directory: Path, model_id: str) -> str:
    """Register and promote a version of ``model_id``; return MLflow's number of it."""
    run = registry.ensure_run(f"run of {model_id}", experiment="names")
    place, evidence = published(directory, model_id, f"v-{model_id.replace('/', '.')}")
    number = registry.register_candidate(model_id, place, evidence, run)
    registry.promote(model_id, number, evidence)
    return number


def test_a_champion_of_one_id_is_not_the_champion_of_another(
    near: Registry, runtime: Any, tmp_path: Path
) -> None:
    slash, hyphens = "names/own", "names--own"
    promoted(near, tmp_path, hyphens)
    assert near.champion(slash) is None
    with pytest.raises(NotFound):
        resolve_source(f"models:/{slash}@champion", runtime)
    promoted(near, tmp_path, slash)
    for each in (slash, hyphens):
        assert resolve_source(f"models:/{each}@champion", runtime)[1].model_id == each
        champion = near.champion(each)
        assert champion is not None
        assert champion.evidence is not None
        assert champion.evidence.model_id == each


def test_a_version_of_another_model_is_refused_by_name(
    near: Registry, runtime: Any, tmp_path: Path
) -> None:
    """Installations of before have registered models that two ids share."""
    asked, other = "names/shared", "names-elsewhere"
    number = promoted(near, tmp_path, asked)
    place, evidence = published(tmp_path, other, "9")
    tags = {"paceline.manifest_digest": evidence.manifest_digest}
    name = registered_name(asked)
    foreign = near.call("create_model_version", name, place, tags=tags, await_creation_for=0)
    for address in (f"models:/{asked}/{foreign.version}", f"models:/{asked}@champion"):
        near.call("set_registered_model_alias", name, "champion", foreign.version)
        with pytest.raises(Conflict, match="a version of another model under this name") as caught:
            resolve_source(address, runtime)
        assert (caught.value.got, caught.value.wanted) == (other, asked)
    with pytest.raises(GateRefused):
        near.champion(asked)
    near.call("set_registered_model_alias", name, "champion", number)
    near.call("set_model_version_tag", name, number, "paceline.promoted_over", foreign.version)
    with pytest.raises(GateRefused):
        near.rollback(asked)
    assert resolve_source(f"models:/{asked}@champion", runtime)[1].model_id == asked


def test_a_registered_model_of_before_is_kept_by_renaming_it(
    near: Registry, runtime: Any, tmp_path: Path
) -> None:
    """What the changelog has users do: MLflow keeps versions, tags and aliases."""
    model_id = "names--before"
    number = promoted(near, tmp_path, model_id)
    new = registered_name(model_id)
    near.call("rename_registered_model", new, model_id)
    with pytest.raises(NotFound):
        resolve_source(f"models:/{model_id}@champion", runtime)
    near.call("rename_registered_model", model_id, new)
    champion = near.champion(model_id)
    assert champion is not None
    assert champion.version == number
    assert resolve_source(f"models:/{model_id}@champion", runtime)[1].model_id == model_id
