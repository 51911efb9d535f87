"""Models judged and asked on a GPU: the same figures and the same text as on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.evaluation import TextModel, device_for, generate, score_transformer
from paceline.evaluation.held_out import HeldOutDocument
from tests.support.hugging_face import FAMILIES, write_model, write_tokenizer

pytestmark = pytest.mark.gpu
TOLERANCE = 1e-5  # relative


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma2", "gpt_neox"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert request.param in FAMILIES
    changes = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0}
    made = write_model(request.param, tmp_path_factory.mktemp("model"), **changes)
    return write_tokenizer(made, [f"line {n} of file {n} is {n * n}" for n in range(200)])


def documents() -> list[HeldOutDocument]:
    return [
        HeldOutDocument(
            f"{n}.txt", text := b"".join(b"line %d of %d\n" % (k, n) for k in range(40)), len(text)
        )
        for n in range(20)
    ]


def test_bits_and_text_are_those_of_the_cpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = score_transformer(model, documents(), lambda _: None)
    text = "".join(generate(TextModel.open(model), "line 7", max_tokens=20))
    assert ours.serving.gpu == torch.cuda.get_device_name()
    assert 0 < ours.serving.peak_memory_bytes < 2**30
    monkeypatch.setattr("paceline.evaluation.text_model.device_for", lambda _: torch.device("cpu"))
    theirs = score_transformer(model, documents(), lambda _: None)
    assert not theirs.serving.gpu
    np.testing.assert_allclose(ours.bits, theirs.bits, rtol=TOLERANCE)
    assert text == "".join(generate(TextModel.open(model), "line 7", max_tokens=20))


def test_a_model_without_room_on_the_gpu_is_judged_on_the_cpu() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    assert device_for(1_000_000).type == "cuda"
    assert device_for(total // 4).type == "cpu"
