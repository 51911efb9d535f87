"""Of pairs of answers a report has the share with the chosen one ahead, and a policy a bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import paceline
from paceline.config import DataSettings, EvaluationSettings, Policy
from paceline.data import assign_splits, build_snapshot
from paceline.evaluation import as_markdown, decide
from paceline.registry.lineage import evaluation_metrics
from paceline.schemas import EvaluationReport
from paceline.storage import DiskStore
from tests.evaluation.reports import LINEAGE
from tests.evaluation.test_policy import LOOSE
from tests.support.hugging_face import CHATML, write_model, write_tokenizer
from tests.training.test_preferences import rows, score

pytestmark = pytest.mark.timeout(240)
SHARE = 0.5
PAIRS = rows()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, found = tmp_path_factory.mktemp("models"), {}
    for name, spread in (("candidate", 0.4), ("base", 0.1)):
        found[name] = write_model("llama", root / name, vocab_size=320, initializer_range=spread)
        texts = [json.dumps(each) for each in PAIRS]
        write_tokenizer(found[name], texts, 275, template=CHATML, end="<|im_end|>")
    return found


@pytest.fixture(scope="module")
def report(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> EvaluationReport:
    root = tmp_path_factory.mktemp("data")
    (root / "source").mkdir()
    lines = "".join(json.dumps(each) + "\n" for each in PAIRS)
    (root / "source" / "rows.jsonl").write_text(lines)
    data = DataSettings(
        format="jsonl", held_out_share=SHARE, tokenizer=str(models["base"] / "tokenizer.json")
    )
    snapshot = build_snapshot(
        str(root / "source"), DiskStore.url_of(root / "data"), data, DiskStore()
    )
    return paceline.evaluate(models, snapshot.url, settings={"evaluation.bootstrap_samples": 100})


def test_the_figure_is_that_of_a_plain_loop(
    models: dict[str, Path], report: EvaluationReport
) -> None:
    held_out = assign_splits([each["key"] for each in PAIRS], SHARE, 0)
    its = [each for each in PAIRS if each["key"] in held_out]
    (found,) = report.metrics
    assert (found.metric, found.code_ref) == ("preference_accuracy", "paceline")
    assert found.higher_is_better
    assert found.documents == len(its) > 5
    shares = {}
    for name, path in models.items():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
        with torch.no_grad():
            ahead = [
                float(score(model, tokenizer, each, "chosen"))
                > float(score(model, tokenizer, each, "rejected"))
                for each in its
            ]
        shares[name] = sum(ahead) / len(ahead)
        assert found.scores[name].value == pytest.approx(shares[name])
        assert found.scores[name].low <= shares[name] <= found.scores[name].high
    assert 0 < shares["candidate"] < 1
    gain = shares["candidate"] - shares["base"]
    assert found.difference_to["base"].value == pytest.approx(gain)
    assert "| preference_accuracy, higher is better | candidate |" in as_markdown(report)
    points = {each.key: each.value for each in evaluation_metrics(report)}
    assert points["eval/candidate/metric/preference_accuracy"] == pytest.approx(shares["candidate"])


def test_a_policy_bounds_it(report: EvaluationReport) -> None:
    low = report.metrics[0].scores["candidate"].low
    for least, passes in ((low, True), (low + 0.01, False)):
        policy = Policy.model_validate(LOOSE | {"min_metrics": {"preference_accuracy": least}})
        checks = decide(report, policy, champion=None, lineage=LINEAGE).checks
        (check,) = [each for each in checks if each.name == "metric preference_accuracy"]
        assert check.passed == passes
    other = report.model_copy(update={"metrics": ()})  # of text
    checks = decide(other, policy, champion=None, lineage=LINEAGE).checks
    (check,) = [each for each in checks if each.name == "metric preference_accuracy"]
    assert not check.passed


def test_a_metric_of_the_users_has_another_name() -> None:
    metric = {"code_ref": "file:///x@sha256:0#m:f", "higher_is_better": True}
    with pytest.raises(ValidationError, match="preference_accuracy is computed of pairs"):
        EvaluationSettings.model_validate({"metrics": {"preference_accuracy": metric}})
