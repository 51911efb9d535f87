"""The model card says what was recorded, the same each time, and takes over the base's licence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from paceline.config import DataSettings
from paceline.data import build_snapshot
from paceline.evaluation import model_card
from paceline.schemas import Evaluation, TrainResult
from paceline.storage import DiskStore
from tests.evaluation.reports import passing

DIGEST = "d" * 64
BASE_CARD = "---\nlicense: other\nlicense_name: acme-terms\nmodel_index: 1\n---\n# Base\n"


def trained() -> TrainResult:
    return TrainResult.model_validate(
        {
            **{"job_id": "job-1", "steps": 40, "resumed_from_step": 0, "first_loss": 3.0},
            **{"final_loss": 2.0, "tokens_per_second": 1.0, "data_wait_share": 0.0},
            **{"checkpoint_stall_share": 0.0, "export_url": "s3://b/export"},
            **{"weights_digest": "e" * 64, "checkpoints": (), "restarts": (), "seconds": 1.0},
            **{"config_digest": DIGEST, "code_version": "0.1.0+src.1", "ranks": 2},
            "snapshot_digest": "f" * 64,
        }
    )


def evaluation(**changes: object) -> Evaluation:
    return Evaluation(
        model_id="acme/tiny",
        base_version="1",
        base_manifest_digest=DIGEST,
        training_digest="a" * 64,
        snapshot_url="s3://b/data",
        models={"candidate": "e" * 64},
        report=passing().model_copy(update=changes),
    )


def test_it_names_data_figures_and_how_to_reproduce_them() -> None:
    card = model_card(evaluation(), trained(), BASE_CARD, is_pretrained=True)
    facts = yaml.safe_load(card.split("---\n")[1])
    assert facts == {
        "base_model": "acme/tiny",
        "library_name": "transformers",
        "license": "other",
        "license_name": "acme-terms",
        "pipeline_tag": "text-generation",
        "tags": ["paceline"],
    }
    again = f"\npaceline reproduce {trained().job_id}\n"
    for said in ("Licence: acme-terms.", "40 steps on 2 ranks", "f" * 64, again):
        assert said in card
    candidate = passing().score("candidate")
    assert candidate is not None
    assert f"| candidate | {candidate.bits_per_byte.value:.4f} |" in card


def test_it_says_what_the_data_are_of_the_snapshots_record(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(40):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"the text of file {number}\n")
    settings = DataSettings(purpose="support", project="desk")
    url = DiskStore.url_of(tmp_path / "data")
    snapshot = build_snapshot(str(tmp_path / "texts"), url, settings, DiskStore())
    learned = snapshot.of_split("train")
    documents, size = (
        sum(getattr(each, x) for each in learned) for x in ("documents", "text_bytes")
    )
    asked = trained().model_copy(update={"snapshot_digest": snapshot.digest})
    card = model_card(evaluation(), asked, is_pretrained=False, data=snapshot)
    assert (
        f"| data | snapshot `{snapshot.digest}`: "
        f"`directory`, {documents} documents, {size} tokens, "
        f"{size} bytes of text to learn from; {40 - documents} documents held out; "
        "purpose `support`, project `desk` |"
    ) in card
    of_default = snapshot.record.model_copy(update={"project": DataSettings().project})
    unnamed = replace(snapshot, record=of_default)
    card = model_card(evaluation(), asked, is_pretrained=False, data=unnamed)
    assert "purpose `support` |" in card, "no project is named where the user named none"
    odd = snapshot.record.model_copy(update={"source": "a|b`c\nd"})
    hostile = model_card(
        evaluation(), asked, is_pretrained=False, data=replace(snapshot, record=odd)
    )
    assert ": `a/b'c\\nd`, " in hostile, "its text stays in its cell"


@pytest.mark.parametrize(
    "front",
    [
        "license: [" * 3000,
        "license: !!int x",
        "date: 2024-13-45\nlicense: {a: b}",
        "a: &a [x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a]\nlicense: [*b,*b,*b,*b,*b,*b]",
        "license: " + 5000 * "x",
    ],
)
def test_a_hostile_card_of_the_base_adds_nothing(front: str) -> None:
    base = f"---\n{front}\n---\n# Base\n"
    card = model_card(evaluation(), trained(), base, is_pretrained=True)
    assert len(card) < 10_000
    if "!!int" not in front:
        assert "that of the base model, whose card names none" in card


def test_the_same_records_give_the_same_bytes_whatever_they_took() -> None:
    card = model_card(evaluation(), trained(), is_pretrained=False)
    assert card == model_card(evaluation(seconds=999.0), trained(), is_pretrained=False)
    assert "library_name" not in card


def test_a_base_card_that_is_none_is_left_alone() -> None:
    for odd in ("# no front matter", "---\n[unclosed\n---\n", "---\n- a list\n---\n", "---\n"):
        assert "Licence: that of the base model" in model_card(
            evaluation(), trained(), odd, is_pretrained=False
        )
