"""LoRA and DoRA in each way of training: the losses of a plain loop with peft, and exports that
transformers and peft load. One launch of ranks for several families."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.hugging_face import FAMILIES
from tests.training.parallel.hugging_face_ranks import ADAPTERS, EXPORTED, STEPS, WAYS

ROOT = Path(__file__).parents[3]
EVERY_TIME = ("llama",)  # the others are shown again nightly
NIGHTLY = tuple(each for each in FAMILIES if each not in EVERY_TIME)

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(
    scope="module", params=[EVERY_TIME, pytest.param(NIGHTLY, marks=pytest.mark.nightly)]
)
def answers(request, tmp_path_factory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What ranks answered, and what another process loads from their exports, without a network."""
    root = tmp_path_factory.mktemp("lora")
    found = []
    for arguments in (["adapt", str(root), *request.param], ["load-adapted", str(root)]):
        done = subprocess.run(
            [sys.executable, "-m", "tests.training.parallel.hugging_face_ranks", *arguments],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=380,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    wanted = {f"{family} {kind}" for family in request.param for kind in ADAPTERS}
    wanted |= {"llama-bf16 LoRA"} if "llama" in request.param else set()
    assert {each.split(":")[0] for each in found[0]} == wanted
    return found[0], found[1]


def furthest(mine: list[float], wanted: list[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(mine, wanted, strict=True))


@pytest.mark.parametrize("way", list(WAYS))
def test_a_way_of_training_has_the_losses_and_norms_of_a_plain_loop_with_peft(answers, way) -> None:
    jobs = {job: each for job, each in answers[0].items() if job.endswith(f": {way}")}
    for job, mine in jobs.items():
        plain = answers[0][f"{job.split(':')[0]}: plain"]
        assert plain["losses"][-1] != plain["losses"][0]
        assert furthest(mine["losses"], plain["losses"]) < 1e-5, job
        assert furthest(mine["norms"], plain["norms"]) < 1e-5, job
    assert jobs


def test_lora_and_dora_differ(answers) -> None:
    for job, mine in answers[0].items():
        dora = answers[0].get(job.replace("LoRA", "DoRA"))
        if " LoRA: " in job and dora is not None:
            assert mine["losses"][-1] != dora["losses"][-1]


def test_a_checkpoint_has_the_adapters_and_their_moments_only(answers) -> None:
    for job, mine in answers[0].items():
        if job.endswith(": plain"):
            continue
        parts = ["lora_A.default.weight", "lora_B.default.weight"]
        if "DoRA" in job:
            parts.append("lora_magnitude_vector.default.weight")
        kinds = {name.split(".", 1)[0] for name in mine["saved"]}
        assert kinds == {"model", "exp_avg", "exp_avg_sq"}
        assert all(name.endswith(tuple(parts)) for name in mine["saved"]), job
        for part in parts:
            assert any(name.endswith(part) for name in mine["saved"]), job


def test_only_gradients_of_adapters_are_sent(answers) -> None:
    for job, mine in answers[0].items():
        if job.endswith(("DDP", "FSDP2", "FSDP2, recomputed")):
            assert mine["sent"] == STEPS * 4 * mine["trained"], job


def test_transformers_and_peft_load_what_was_trained(answers) -> None:
    """Merged weights give the logits of the unmerged model, and the adapter alone does, too."""
    ranks, loaded = answers
    exports = [name for name in loaded if name in ranks]
    assert {each.split(": ")[1] for each in exports} == set(EXPORTED)
    for name in exports:
        trained = ranks[name]
        assert loaded[name]["wrong"] == []
        assert loaded[name]["weights"] == trained["weights"]
        is_half = "bf16" in name
        assert loaded[name]["dtype"] == ("torch.bfloat16" if is_half else "torch.float32")
        rounding = 0.1 if is_half else 1e-5
        assert loaded[name]["logits"] == pytest.approx(trained["unmerged"], abs=rounding)
        assert loaded[f"{name}-adapter"] == pytest.approx(trained["unmerged"], abs=1e-5)
        assert loaded[name]["logits"] != pytest.approx(
            loaded[name.split()[0]]["logits"], abs=1e-3
        ), "the adapters changed the model"


def test_weights_without_adapters_stay_as_they_were(answers) -> None:
    for name, each in answers[1].items():
        if " LoRA: " not in name or name.endswith("-adapter"):
            continue
        base = answers[1][name.split()[0]]["weights"]
        changed = {at for at in base if base[at] != each["weights"][at]}
        targets = ("q_proj.weight", "v_proj.weight", "query_key_value.weight")
        assert changed == {at for at in base if at.endswith(targets)}
