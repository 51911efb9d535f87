"""What is registered loads with MLflow's own call, from the object store and not through MLflow."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from paceline.manifest import publish_model
from paceline.models import ModelConfig, new_model, save_model
from paceline.registry import MLMODEL_FILE, Registry, mlmodel
from tests.registry.bundles import make_evidence
from tests.support.rclone import RcloneS3

pytestmark = [pytest.mark.xdist_group("prefect"), pytest.mark.timeout(240)]  # one server
_names = itertools.count(1)


@pytest.mark.filterwarnings("ignore")  # MLflow's, of libraries' versions that it does not find
def test_a_registered_version_loads_with_mlflow_from_its_place(
    registry: Registry, s3: RcloneS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    model_id = f"acme/loaded-{next(_names)}"
    config = ModelConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    save_model(new_model(config, 0), config, tmp_path / "model")
    store = s3.store()
    store.ensure_bucket("loading")
    url = f"s3://loading/models/{model_id}/7"
    manifest = publish_model(
        tmp_path / "model", url, model_id=model_id, version="7", store=store, link_mbit=100.0
    )
    store.put_bytes(f"{url}/{MLMODEL_FILE}", mlmodel(model_id, url, manifest.digest))
    run = registry.ensure_run("run of loading", experiment="loading")
    evidence = make_evidence(model_id, "1")
    number = registry.register_candidate(model_id, url, evidence, run)

    name = model_id.replace("/", "--")
    version = registry.call("get_model_version", name, number)
    assert (number, version.tags["paceline.version"]) == ("1", "7")
    assert "v7" in version.description
    assert registry.call("get_model_version_download_uri", name, number) == url
    (logged,) = registry.call("get_run", run).outputs.model_outputs
    tags = registry.call("get_logged_model", logged.model_id).tags
    assert (tags["paceline.version"], name in tags["mlflow.modelVersions"]) == ("7", True)
    assert registry.register_candidate(model_id, url, evidence, run) == number, "once"

    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", s3.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    mlflow.set_tracking_uri(registry.tracking_uri)
    mlflow.set_registry_uri(registry.tracking_uri)
    loaded = mlflow.pyfunc.load_model(
        f"models:/{name}/{number}", dst_path=_made(tmp_path / "loaded")
    )
    found = loaded.predict(["def add(", "import "], params={"max_tokens": 4})
    assert [type(each) for each in found] == [str, str]
    assert max(map(len, found)) <= 4, "of bytes"
    drawn = {"temperature": 1.0, "seed": 3, "max_tokens": 4}
    assert loaded.predict("import ", params=drawn) == loaded.predict(["import "], params=drawn)
    again = mlflow.pyfunc.load_model(url, dst_path=_made(tmp_path / "again"))
    assert again.predict(["def add(", "import "], params={"max_tokens": 4}) == found


def _made(path: Path) -> str:
    path.mkdir()
    return str(path)
