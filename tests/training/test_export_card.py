"""The export of a training says what it is: a card, the same for the same training."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from paceline.models import CARD_FILE
from tests.evaluation.test_card import BASE_CARD
from tests.support.hugging_face import write_model
from tests.training.test_cli_training import nothing_starts
from tests.training.test_continuing import text, train

__all__ = ["nothing_starts", "text"]  # fixtures

pytestmark = pytest.mark.xdist_group("warm node")


def test_it_names_data_configuration_and_the_bases_licence(text: Path, tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model")
    (model / CARD_FILE).write_text(BASE_CARD)
    asked = ("--steps", "2", "--model", str(model))
    made, _ = train(text, tmp_path / "once", *asked)
    card = (tmp_path / "once/checkpoints" / made["job_id"] / "export/README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1]) == {
        "library_name": "transformers",
        "license": "other",
        "license_name": "acme-terms",
        "pipeline_tag": "text-generation",
        "tags": ["paceline"],
    }
    for said in ("Licence: acme-terms.", f"`{made['job_id']}`, 2 steps", "\nNot judged.\n",
                 f"snapshot `{made['snapshot_digest']}`", f"`{made['config_digest']}`",
                 "`directory`, ", " bytes of text to learn from; ",
                 "; purpose `language-model-training`",
                 f"`{made['weights_digest']}`", "\npaceline reproduce OUTPUT\n"):  # fmt: skip
        assert said in card, card
    (model / CARD_FILE).unlink()
    other, _ = train(text, tmp_path / "bare", *asked)
    assert other["job_id"] == made["job_id"], "a card of the base is none of its weights"
    bare = (tmp_path / "bare/checkpoints" / made["job_id"] / "export/README.md").read_text()
    one, again = (
        [line for line in each.splitlines() if not line.lower().startswith("licen")]
        for each in (card, bare)
    )
    assert one == again, "the same training has the same card"
    assert "Licence: that of the base model, whose card names none." in bare


@pytest.mark.nightly
def test_the_adapter_has_the_card_too(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = write_model("llama", tmp_path / "model")
    asked = ("--steps", "2", "--model", str(model), "--set", "training.lora.r=4")
    made, _ = train(text, tmp_path / "out", *asked)
    job = tmp_path / "out/checkpoints" / made["job_id"]
    assert (job / "adapter/README.md").read_text() == (job / "export/README.md").read_text()
