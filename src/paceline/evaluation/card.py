"""The model card (README.md) of a candidate, from what was recorded of its training and judgement.

The same records give the same bytes: the card is a file of the version that the gate judges.
Figures that change from run to run (seconds, latency) are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.evaluation.report import comparison_rows, scored_text
from paceline.schemas import Evaluation, TrainResult

CARD_FILE = "README.md"
MAX_CARD_BYTES = 1024 * 1024  # of a base's card that is read
# What a fine-tuned model takes over from its base's card.
INHERITED = ("license", "license_name", "license_link", "language")


def model_card(
    evaluation: Evaluation, trained: TrainResult, base_card: str = "", *, is_pretrained: bool
) -> str:
    """Return the card of ``trained``'s model, judged by ``evaluation``.

    ``base_card`` is the README.md of the base model, whose licence the card repeats. Of a model
    that transformers loads (``is_pretrained``) it says so.
    """
    import yaml

    base = f"{evaluation.model_id} {evaluation.base_version}"
    known = metadata(base_card)
    facts: dict[str, Any] = {each: known[each] for each in INHERITED if each in known}
    facts["base_model"] = evaluation.model_id
    if is_pretrained:
        facts |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    facts["tags"] = ["paceline"]
    report = evaluation.report
    rows = {
        "base model": f"{base}, manifest `{evaluation.base_manifest_digest}`",
        "data": f"snapshot `{trained.snapshot_digest}`",
        "job": f"`{trained.job_id}`, {trained.steps} steps on {trained.ranks} ranks",
        "configuration": f"`{trained.config_digest}`",
        "code": f"`{trained.code_version}`",
        "weights": f"`{trained.weights_digest}`",
        "record of the training": f"`{evaluation.training_digest}`",
    }
    licence = facts.get("license_name") or facts.get("license")
    overlaps = [
        f"Of {each.held_out_documents} held-out documents {each.found} are among the "
        f"{each.training_documents} of the training snapshot `{each.snapshot_digest[:12]}`; "
        f"{each.overlapping or 0} have at least half of their text there."
        + "".join(f" Of the {of.rows} rows of task {of.task} {of.found}." for of in each.tasks)
        for each in report.overlaps or ()
    ]
    front = yaml.safe_dump(facts, sort_keys=True, allow_unicode=True)
    lines = [
        f"---\n{front}---",
        f"# {evaluation.model_id}, trained from version {evaluation.base_version}",
        "",
        f"Licence: {licence or 'that of the base model, whose card names none'}.",
        "",
        "## Training",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
        "## Evaluation",
        "",
        f"Held out: {scored_text(report)} of snapshot "
        f"`{report.snapshot_digest}`. Bits per byte, lower is better; intervals by bootstrap over "
        "documents, differences are paired.",
        "",
        *comparison_rows(report),
        "",
        *overlaps,
        "",
        "## Reproduce",
        "",
        "On the installation that trained it:",
        "",
        "```",
        f"paceline reproduce {trained.job_id}",
        "```",
    ]
    return "\n".join(lines) + "\n"


def metadata(card: str) -> Mapping[str, Any]:
    """Return what stands in ``card`` between its first two lines of ``---``; {} where nothing."""
    import yaml

    parts = card.split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return {}
    try:
        found = yaml.safe_load(parts[1])
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}
