"""A job whose base it cannot train is refused where it is submitted, in one line, without torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.api import jobs
from paceline.manifest import publish_model
from paceline.training import base_check
from tests.api.conftest import call
from tests.api.test_data_purposes import JOBS, at
from tests.support.hugging_face import (
    change_config as config,
    change_weights as weights,
    write_model,
    write_tokenizer,
)

__all__ = ["at"]  # a fixture
WEIGHTS = "model.safetensors"
INDEX = '{"weight_map": {"a": "b.safetensors"}}'
MASK = "model.layers.0.attention.bias"  # of old GPT-NeoX files: nothing reads it
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
PROJECTION = "model.layers.1.mlp.up_proj.weight"
NEOX = "gpt_neox.embed_in.weight (and 9 more)"


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "sound": (lambda d: weights(d, lambda t: t.update({MASK: torch.ones(2).bool()})), ""),
    "NaN": (lambda d: weights(d, lambda t: t[NORM].fill_(torch.nan)), f"infinity in {NORM}"),
    "infinity": (lambda d: weights(d, lambda t: t[NORM].fill_(-torch.inf)), f"infinity in {NORM}"),
    "tokenizer": (lambda d: write_tokenizer(d, ["a b c"]), "different tokenizers"),
    "context": (lambda d: config(d, max_position_embeddings=16), "at most 16"),
    "family": (lambda d: config(d, model_type="bert"), "model_type 'bert'"),
    "code": (lambda d: config(d, auto_map={"AutoModel": "x.y"}), "trust_remote_code"),
    "rows": (lambda d: config(d, vocab_size=300), f"{EMBEDDING} [257, 32]"),
    "layers": (lambda d: config(d, num_hidden_layers=3), "2 layers"),
    "dtypes": (lambda d: weights(d, lambda t: t.update({NORM: t[NORM].half()})), "F16, F32"),
    "architecture": (lambda d: config(d, model_type="gpt_neox", architectures=None), NEOX),
    "tensor": (lambda d: weights(d, lambda t: t.pop(PROJECTION)), f"{PROJECTION} (and 0 more)"),
    "index": (lambda d: (d / f"{WEIGHTS}.index.json").write_text(INDEX), "no b.safetensors"),
    "pickled": (lambda d: (d / "pytorch_model.bin").write_bytes(b"x"), "pytorch_model.bin"),
    "not JSON": (lambda d: (d / "config.json").write_text("{"), "not JSON"),
    "cut short": (lambda d: (d / WEIGHTS).write_bytes(b"\x10\0\0"), WEIGHTS),
}  # fmt: skip


ASKED: dict[str, tuple[dict[str, str], str]] = {
    "defaults": ({"training.lora.r": "2"}, ""),
    "all": ({"training.lora.target_modules": "all-linear"}, ""),
    "end of a name": ({"training.lora.target_modules": "mlp.up_proj"}, ""),
    "no layer": ({"training.lora.target_modules": "nope"}, "nope linear layers: down_proj"),
    "no end": ({"training.lora.target_modules": "proj"}, "proj linear layers: down_proj"),
    "output": ({"training.lora.target_modules": "lm_head"}, "lm_head linear layers: down_proj"),
    "data": ({"training.dpo.beta": "0.1"}, "training.dpo and text"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("sound") / "model", vocab_size=257)


@pytest.mark.parametrize("name", list(SPOILT))
def test_a_base_that_the_job_cannot_train_is_refused_at_submission(
    at: Any, s3: Any, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    spoil, words = SPOILT[name]
    monkeypatch.setattr(
        base_check, "check_in_process", lambda *_, **__: pytest.fail("a process with torch")
    )
    monkeypatch.setattr(jobs, "_require_room", lambda *_: None)  # no node is there
    made = Path(shutil.copytree(sound, tmp_path / "model"))
    spoil(made)
    version = f"v{list(SPOILT).index(name)}"
    publish_model(
        made, f"s3://paceline/models/llama/{version}", model_id="llama", version=version,
        store=s3.store(), link_mbit=100, allow_older=True,
    )  # fmt: skip
    refused(at, version, {}, "" if name == "sound" else words)


def refused(at: Any, version: str, parameters: dict[str, Any], words: str) -> None:
    """Submit; the answer is one line with ``words``, or the job where there are none."""
    body = {
        "model_id": "llama", "version": version, "dataSnapshot": at.snapshot.url,
        "parameters": {"model.context": 32} | parameters,
    }  # fmt: skip
    answer = call(at, "POST", JOBS, at.nlp, json=body)
    if not words:
        assert answer.status_code == 201, answer.text
        return
    assert answer.status_code == 422, answer.text
    found = answer.json()
    said = " ".join(str(found.get(key)) for key in ("detail", "got", "wanted", "where"))
    assert words in said
    assert "\n" not in said
    assert "/tmp" not in answer.text, "the version is named, and no copy of it"


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_settings_that_do_not_fit_the_base_are_refused_at_submission(
    at: Any, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(jobs, "_require_room", lambda *_: None)  # no node is there
    made = write_model(family, tmp_path / "model", vocab_size=257)
    publish_model(
        made, f"s3://paceline/models/llama/{family}", model_id="llama", version=family,
        store=s3.store(), link_mbit=100, allow_older=True,
    )  # fmt: skip
    for name, (parameters, words) in ASKED.items():
        if family == "llama" or name in ("defaults", "all", "data"):
            refused(at, family, parameters, words)
