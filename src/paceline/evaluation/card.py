"""The model card of a candidate, from what was recorded of its training and judgement."""

from __future__ import annotations

from paceline.data import Snapshot
from paceline.evaluation.report import comparison_rows, scored_text
from paceline.models import card_text
from paceline.schemas import Evaluation, TrainResult
from paceline.units import counted


def model_card(
    evaluation: Evaluation,
    trained: TrainResult,
    base_card: str = "",
    *,
    is_pretrained: bool,
    data: Snapshot | None = None,
) -> str:
    """Return the card of ``trained``'s model, judged by ``evaluation``; ``data`` is the snapshot
    that it learned from, where that can be read; the rest as of ``card_text``."""
    base = f"{evaluation.model_id} {evaluation.base_version}"
    report = evaluation.report
    rows = {
        "base model": f"{base}, manifest `{evaluation.base_manifest_digest}`",
        "data": f"snapshot `{trained.snapshot_digest}`" if data is None else data.in_words,
        "job": f"`{trained.job_id}`, {counted(trained.steps, 'step')} on "
        f"{counted(trained.ranks, 'rank')}",
        "configuration": f"`{trained.config_digest}`",
        "code": f"`{trained.code_version}`",
        "weights": f"`{trained.weights_digest}`",
        "record of the training": f"`{evaluation.training_digest}`",
    }
    overlaps = [
        f"Of {each.held_out_documents} held-out documents {each.found} are among the "
        f"{each.training_documents} of the training snapshot `{each.snapshot_digest[:12]}`; "
        f"{each.overlapping or 0} have at least half of their text there."
        + "".join(f" Of the {of.rows} rows of task {of.task} {of.found}." for of in each.tasks)
        for each in report.overlaps or ()
    ]
    judgement = [
        f"Held out: {scored_text(report)} of snapshot "
        f"`{report.snapshot_digest}`. Bits per byte, lower is better; intervals by bootstrap over "
        "documents, differences are paired.",
        "",
        *comparison_rows(report),
        "",
        *overlaps,
    ]
    return card_text(
        f"{evaluation.model_id}, trained from version {evaluation.base_version}",
        rows,
        judgement,
        trained.job_id,
        base_card=base_card,
        base_model=evaluation.model_id,
        is_pretrained=is_pretrained,
    )
