"""How large the files of an export are is a setting, and changes no weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from paceline.models import load_model
from tests.support.hugging_face import write_model
from tests.training.test_cli_training import nothing_starts
from tests.training.test_continuing import FSDP, text, train

__all__ = ["nothing_starts", "text"]  # fixtures

pytestmark = pytest.mark.xdist_group("warm node")
LIMIT = 8_000


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: each
        for path in directory.glob("*.safetensors")
        for name, each in load_file(path).items()
    }


@pytest.mark.parametrize("of", ["ours", "transformers"])
def test_the_same_training_is_exported_in_smaller_files(
    text: Path, tmp_path: Path, of: str
) -> None:
    out, asked = tmp_path / "out", ["--steps", "2"]
    if of == "transformers":
        asked += ["--model", str(write_model("qwen2", tmp_path / "base")), *FSDP]
    whole, _ = train(text, out, *asked)
    asked += ["--set", f"training.export_file_bytes={LIMIT}"]
    cut, _ = train(text, out, *asked)
    assert cut["job_id"] == whole["job_id"]
    assert cut["resumed_from_step"] == 2, "no step is made again"
    assert cut["weights_digest"] != whole["weights_digest"], "it covers the files"
    job = out / "checkpoints" / whole["job_id"]
    small = job / f"export-{LIMIT}"
    files = sorted(small.glob("*.safetensors"))
    assert len(files) > len(list((job / "export").glob("*.safetensors")))
    for path in files:
        with safe_open(path, framework="pt") as opened:
            assert path.stat().st_size <= LIMIT or len(opened.keys()) == 1, path.name
    first, second = weights_of(job / "export"), weights_of(small)
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)
    if of == "ours":
        load_model(small)
    else:
        from transformers import AutoModelForCausalLM

        AutoModelForCausalLM.from_pretrained(small)
    again, _ = train(text, out, *asked)
    assert again | {"notes": cut["notes"]} == cut, "the stored result: nothing starts"
