"""A candidate is packaged as it would be published."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config import Profile
from paceline.manifest import build_manifest
from paceline.models import weights_digest
from paceline.storage import DiskStore
from paceline.tasks import package
from paceline.tasks._support.run import StageResult
from tests.support.hugging_face import write_model


# of the ledger, which others write: of an earlier release, and forged
@pytest.mark.parametrize("stored", [{}, {"bytes": 1, "file_bytes": 1}])
def test_the_gate_is_given_the_largest_weights_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: dict[str, int]
) -> None:
    export = write_model("llama", tmp_path / "export", shard="20KB")
    (export / "tokenizer.json").write_text(" " * 10**6)  # of no weights
    base = build_manifest(export, model_id="m", version="1", link_mbit=100)
    run: Any = SimpleNamespace(
        store=DiskStore(),
        work_dir=tmp_path,
        mlflow_run="",
        registry=SimpleNamespace(log_artifact_text=lambda *_: None),
        runtime=SimpleNamespace(profile=Profile(), models_url=(tmp_path / "models").as_uri()),
        stage=lambda name, _, work, **__: StageResult(
            stage=name, output=work() | stored, seconds=0, reused=bool(stored)
        ),
    )
    trained: Any = SimpleNamespace(
        export_url=export.as_uri(),
        weights_digest=weights_digest(export),
        program=None,
        snapshot_url=None,
    )
    monkeypatch.setattr(package, "model_card", lambda *_, **__: "a card")
    packaged = package.package_candidate.fn(run, base, trained, {}).output  # type: ignore[arg-type]
    sizes = [each.stat().st_size for each in export.glob("*.safetensors")]
    assert len(sizes) > 1
    assert packaged["file_bytes"] == max(sizes)
    files = [each for each in export.iterdir() if each.name != "README.md"]
    assert packaged["bytes"] == sum(each.stat().st_size for each in files) + len("a card")
