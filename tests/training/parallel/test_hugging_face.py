"""Each family of transformers, in each way of training: the losses of a plain loop, and an export
that transformers and peft load. All weights, LoRA, DoRA, conversations and preferences in one
launch of ranks, our own transformer among the families."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.support.forked import run_gangs
from tests.support.hugging_face import FAMILIES
from tests.training.parallel.hugging_face_ranks import (
    ADAPTERS,
    AVERAGE,
    BRIEF,
    DPO,
    EVERY_WAY,
    FOUR,
    HALF,
    MUON,
    OWN,
    SFT,
    STEPS,
    data_of,
    exported_of,
    kinds_of,
    ways_of,
)

# each in a launch of its own
NIGHTLY = [(each,) for each in (*FAMILIES, EVERY_WAY, FOUR, OWN) if each != BRIEF]

pytestmark = [pytest.mark.timeout(400), pytest.mark.xdist_group("forked ranks")]
Answers = dict[str, dict[str, Any]]


@pytest.fixture(
    scope="module",
    params=[(BRIEF,), *(pytest.param(turn, marks=pytest.mark.nightly) for turn in NIGHTLY)],
    ids=",".join,
)
def answers(request, tmp_path_factory) -> Answers:
    """What ranks answered, and what a process without a network loads from their exports."""
    root = tmp_path_factory.mktemp("hugging-face")
    words = (str(root), *request.param)
    ((done,),) = run_gangs("tests.training.parallel.hugging_face_ranks", [[words]], 380)
    assert done.code == 0, done.err[-4000:]
    found: Answers = json.loads(done.out.splitlines()[-1])
    wanted = {
        f"{family} {kind}".strip() + f": {way}"
        for family in request.param
        for kind in kinds_of(family)
        for way in ("plain", *ways_of(family, kind))
    }
    assert wanted <= found["ranks"].keys()
    return found


def kind_of(job: str) -> str:
    return job.split(":", maxsplit=1)[0].partition(" ")[2]


def is_adapted(job: str) -> bool:
    return kind_of(job) in ADAPTERS


def furthest(mine: list[float], wanted: list[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(mine, wanted, strict=True))


def hold_to_plain_loops(
    ranks: dict[str, Any], *kinds: str, within: float = 1e-5, norms_within: float | None = None
) -> None:
    for job, mine in ranks.items():
        if kind_of(job) in kinds:
            plain = ranks[f"{job.split(':')[0]}: plain"]
            learned = plain["losses"][0] - plain["losses"][-1]
            assert learned > 0.1 if kind_of(job) in ("", SFT) else learned != 0, "the loop learns"
            assert furthest(mine["losses"], plain["losses"]) < within, job
            assert furthest(mine["norms"], plain["norms"]) < (norms_within or within), job


def test_a_way_of_training_has_the_losses_and_norms_of_a_plain_loop(answers) -> None:
    hold_to_plain_loops(answers["ranks"], "")


def test_a_way_of_training_has_a_plain_peft_loops_losses_and_norms(answers) -> None:
    hold_to_plain_loops(answers["ranks"], *ADAPTERS)


def test_conversations_have_a_plain_labelled_loops_losses_and_norms(answers) -> None:
    hold_to_plain_loops(answers["ranks"], SFT, f"{SFT} LoRA")


def test_preferences_have_the_losses_and_norms_of_a_plain_loop(answers) -> None:
    hold_to_plain_loops(answers["ranks"], DPO, f"{DPO} LoRA")
    for job, mine in answers["ranks"].items():
        if data_of(kind_of(job)) == DPO:
            assert mine["losses"][0] == pytest.approx(math.log(2), abs=1e-6), "against the base"


def test_muon_has_the_losses_and_norms_of_a_plain_loop(answers) -> None:
    # Its updates are computed in bfloat16: a last bit of a gradient may change one of them.
    hold_to_plain_loops(answers["ranks"], MUON, within=1e-4)


def test_an_average_of_weights_is_that_of_a_plain_loop(answers) -> None:
    hold_to_plain_loops(answers["ranks"], AVERAGE)
    for job, mine in answers["ranks"].items():
        if kind_of(job) == AVERAGE:
            plain = answers["ranks"][f"{job.split(':')[0]}: plain"]["averaged"]
            assert mine["averaged"] == pytest.approx(plain, abs=5e-5), job


def test_bfloat16_has_the_losses_of_a_plain_autocast_loop(answers) -> None:
    hold_to_plain_loops(answers["ranks"], HALF, within=1e-3, norms_within=5e-3)


def test_lora_and_dora_differ(answers) -> None:
    for job, mine in answers["ranks"].items():
        dora = answers["ranks"].get(job.replace("LoRA", "DoRA"))
        if " LoRA: " in job and dora is not None:
            assert mine["losses"][-1] != dora["losses"][-1]


def test_a_rank_reads_only_its_share_of_the_weights(answers) -> None:
    ranks = answers["ranks"]
    for job, whole in ranks.items():
        if job.endswith(": DDP") and not kind_of(job):
            shares = ranks[job.replace("DDP", "FSDP2")]
            assert shares["read"] == pytest.approx(whole["read"] / 2, rel=0.01), job
            assert ranks[job.replace("DDP", "CP")]["read"] == shares["read"], job
            cut = ranks[job.replace("DDP", "TP")]  # norms are whole
            assert cut["read"] == pytest.approx(whole["read"] / 2, rel=0.02), job
            staged = ranks[job.replace("DDP", "PP")]  # a layer of two and a whole embedding
            assert staged["read"] < whole["read"] * 0.75, job
            if both := ranks.get(job.replace("DDP", "FSDP2 x TP")):
                assert both["read"] == pytest.approx(whole["read"] / 4, rel=0.02), job


def test_a_checkpoint_has_the_adapters_and_their_moments_only(answers) -> None:
    for job, mine in answers["ranks"].items():
        if job.endswith(": plain") or not is_adapted(job):
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
    for job, mine in answers["ranks"].items():
        if is_adapted(job) and job.endswith(("DDP", "FSDP2", "FSDP2, recomputed")):
            assert mine["sent"] == STEPS * 4 * mine["trained"], job


def test_transformers_loads_an_export_bit_for_bit(answers) -> None:
    exports = {name: each for name, each in answers["loaded"].items() if ": " in name}
    assert {name.split(":")[0] for name in exports} == {
        name.split(":")[0]
        for name in answers["ranks"]
        if exported_of(name.split(":")[0].partition(" ")[0], kind_of(name))
    }
    for name, loaded in exports.items():
        trained = answers["ranks"][name]
        assert loaded["wrong"] == []
        assert loaded["weights"] == trained["weights"]
        if "bf16" in name:
            assert loaded["dtype"] == "torch.bfloat16"
        else:
            assert loaded["dtype"] == "torch.float32"
            if "PP" not in name:  # no rank has all layers
                assert loaded["logits"] == pytest.approx(trained["logits"], abs=1e-5)


def test_peft_loads_what_was_trained(answers) -> None:
    """Merged weights give the logits of the unmerged model, and the adapter alone does, too."""
    assert set(answers["adapters"]) == {
        each for each in answers["loaded"] if ": " in each and is_adapted(each)
    }
    for name, logits in answers["adapters"].items():
        trained, merged = answers["ranks"][name], answers["loaded"][name]
        rounding = 0.1 if "bf16" in name else 1e-5
        assert merged["logits"] == pytest.approx(trained["unmerged"], abs=rounding)
        assert logits == pytest.approx(trained["unmerged"], abs=1e-5)
        base = answers["loaded"][name.split()[0]]
        assert merged["logits"] != pytest.approx(base["logits"], abs=1e-3), "the adapters count"


def test_weights_without_adapters_stay_as_they_were(answers) -> None:
    for name, each in answers["loaded"].items():
        if " LoRA: " not in name:
            continue
        base = answers["loaded"][name.split()[0]]["weights"]
        changed = {at for at in base if base[at] != each["weights"][at]}
        targets = ("q_proj.weight", "v_proj.weight", "query_key_value.weight")
        assert changed == {at for at in base if at.endswith(targets)}
