"""docs/how-to/train-your-hugging-face-model.md, "Train adapters only", typed: LoRA and DoRA on two
ranks; transformers and peft load the results offline."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.journeys.guide import commands_under
from tests.journeys.test_a_hugging_face_model_is_trained import PAGE, export_of, places, typed

__all__ = ["places"]  # a fixture

pytestmark = pytest.mark.nightly
# What a user does with the results, without a network and without paceline.
LOAD = """
import json, sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
base, export, adapter = sys.argv[1:]
asked = AutoTokenizer.from_pretrained(export)("line 7 of file 3", return_tensors="pt")
model, info = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
plain = AutoModelForCausalLM.from_pretrained(base)
with torch.no_grad():
    merged, before = model(**asked).logits, plain(**asked).logits
    adapted = PeftModel.from_pretrained(plain, adapter)(**asked).logits
print(json.dumps({
    "wrong": sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"]])),
    "apart": float((merged - adapted).abs().max()),
    "learnt": float((merged - before).abs().max()),
}))
"""


def size_of(checkpoints: Path) -> int:
    """Return the bytes of the newest generation's tensors."""
    newest = max(checkpoints.glob("step-*"))
    return sum(each.stat().st_size for each in newest.glob("*.safetensors"))


@pytest.mark.timeout(900)
def test_the_page_trains_adapters_that_transformers_and_peft_load(places, tmp_path) -> None:
    lines = commands_under(PAGE, "Train adapters only", **places)
    assert len(lines) == 2
    full = commands_under(PAGE, "Train it", **places)[0]
    sizes = {}
    for name, line in {"full": full, "LoRA": lines[0], "DoRA": lines[1]}.items():
        output = str(tmp_path / name)
        done = typed("bash", "-ec", line.replace(places["OUTPUT"], output), home=tmp_path)
        job = export_of(output).parent
        sizes[name] = size_of(job)
        if name == "full":
            continue
        assert f"  trained {name} adapters of rank 8 on " in done.stderr
        found = [*map(str, (places["MODEL"], job / "export", job / "adapter"))]
        loaded = json.loads(typed(sys.executable, "-c", LOAD, *found, home=tmp_path).stdout)
        assert loaded["wrong"] == []
        assert loaded["apart"] < 1e-5 < 1e-3 < loaded["learnt"], loaded
    assert sizes["LoRA"] < sizes["full"] / 4
    assert sizes["LoRA"] < sizes["DoRA"] < sizes["full"]
