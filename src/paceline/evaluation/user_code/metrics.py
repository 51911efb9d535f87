"""Metrics of a figure for each held-out document: those of the user's own, by a function of pinned
code, and the preference accuracy of pairs of answers.

The function runs in a process of its own; this one passes it samples (``MetricSample``), checks the
figures, and compares models by them as by any other figure. Does not depend on what a metric means.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config import PREFERENCE_ACCURACY, EvaluationSettings, MetricSettings
from paceline.data import Tokenizer
from paceline.errors import InvalidInput, PermanentError
from paceline.evaluation.gate import METRIC
from paceline.evaluation.generation import generate
from paceline.evaluation.held_out import HeldOutDocument, prefix, slices_of
from paceline.evaluation.scoring import OnProgress, compared_means
from paceline.evaluation.text_model import AllowedCode, TextModel
from paceline.evaluation.transformer import token_figures
from paceline.evaluation.user_code.process import MAX_ANSWER_BYTES, UserProcess
from paceline.models import local_model_digest
from paceline.schemas import (
    EvaluationReport,
    MetricSample,
    MetricScore,
    RecordedScore,
    metric_digest,
)

CHILD = "paceline.training.user_code.metrics"  # by its name, as that of models
SAMPLES = 64  # of one call
LARGEST = 1e100  # figure, so that sums are finite
_KNOWN = MetricSample(
    name="probe", text="one two", tokens=(1, 2), log_probs=(-0.1, -2.0), correct=(True, False),
    prompt="one", prediction=" two", reference=" two",
)  # fmt: skip
PROBE = (_KNOWN, _KNOWN.model_copy(update={"correct": (False, False), "prediction": ""}))


class UserMetric:
    """A metric: called with samples, it returns a figure for each. Its process ends with it."""

    def __init__(self, name: str, settings: MetricSettings, allowed: AllowedCode) -> None:
        """Load the function; raises as ``training.user_code.load``."""
        self._where = f"evaluation.metrics.{name} {settings.code_ref}"
        self._process = UserProcess(CHILD, self._where)
        asked = {
            "name": name,
            "code_ref": settings.code_ref,
            "sources": list(allowed.sources),
            "cache": str(allowed.cache),
        }
        self._process.ask(json.dumps(asked).encode())

    def __call__(self, samples: Sequence[MetricSample]) -> list[float]:
        """Return the figures; raises InvalidInput unless they are as many finite numbers as
        samples, TrainingFailed where the code raises, ends its process, or does not end."""
        request = json.dumps([each.model_dump(mode="json") for each in samples])
        answer = self._process.ask(request.encode(), MAX_ANSWER_BYTES)
        try:
            figures = [float(each) for each in json.loads(answer)]
        except (ValueError, TypeError, RecursionError) as error:
            raise self._process.odd(answer) from error
        odd = [x for x in zip(figures, samples, strict=False) if not abs(x[0]) <= LARGEST]
        if odd or len(figures) != len(samples):
            got = f"{odd[0][0]} of {odd[0][1].name}" if odd else f"{len(figures)} figures"
            raise InvalidInput(
                "a metric does not return a number for each sample",
                got=got,
                wanted=f"{len(samples)} numbers within ±{LARGEST:g}",
                where=self._where,
            )
        return figures

    def of_all(self, samples: Sequence[MetricSample]) -> NDArray[np.float64]:
        """Return the figures of any number of samples, by one call for each SAMPLES."""
        firsts = range(0, len(samples), SAMPLES)
        return np.concatenate([self(samples[first : first + SAMPLES]) for first in firsts])


def require_metrics(settings: EvaluationSettings, allowed: AllowedCode) -> None:
    """Call each metric of ``settings`` with two samples; raises as ``UserMetric`` does."""
    for name, its in settings.metrics.items():
        UserMetric(name, its, allowed)(PROBE)


def with_metrics(
    report: EvaluationReport,
    models: Mapping[str, Path],
    held_out: Sequence[HeldOutDocument],
    settings: EvaluationSettings,
    allowed: AllowedCode,
    tokenizer: Tokenizer | None = None,
    *,
    on_progress: OnProgress = lambda _fraction, _message: None,
    known: Sequence[RecordedScore] = (),
    on_scored: Callable[[str, str, NDArray[np.float64]], None] = lambda *_: None,
) -> EvaluationReport:
    """Return ``report`` with each of ``settings.metrics``, and of pairs with the preference
    accuracy, of every model that it has a score of.

    ``known`` figures are not computed again; each new one is passed to ``on_scored`` (digest of the
    model's files, ``metric_digest``, figures). A metric that fails on one model has no figures, and
    an entry in ``failures``.
    """
    if not (metrics := settings.metrics_of(pairs=_are_pairs(held_out))):
        return report
    began = time.monotonic()
    done = {(each.subject, each.snapshot_digest): np.array(each.bits) for each in known}
    figures: dict[str, dict[str, NDArray[np.float64]]] = {name: {} for name in metrics}
    failures: dict[str, str] = {}
    opened: dict[str, UserMetric] = {}
    scored = [name for name in models if report.score(name)]
    for number, model in enumerate(scored):
        subject = local_model_digest(models[model])
        outputs = _Outputs(models[model], held_out, tokenizer, allowed, settings.context)
        for name, its in metrics.items():
            key = subject, metric_digest(report.snapshot_digest, its)
            try:
                if key not in done and name not in failures:
                    on_progress(number / len(scored), f"{model}: metric {name}")
                    if name == PREFERENCE_ACCURACY:
                        done[key] = outputs.prefers_chosen()
                    else:
                        if name not in opened:
                            opened[name] = UserMetric(name, its, allowed)
                        done[key] = opened[name].of_all(outputs.samples(its.max_new_tokens))
                    on_scored(*key, done[key])
            except PermanentError as error:
                failures[name] = error.one_line()
            if name not in failures:
                figures[name][model] = done[key]
    scores = tuple(
        MetricScore(
            metric=name,
            code_ref=its.code_ref,
            higher_is_better=its.higher_is_better,
            **compared_means(figures[name], settings),
            slices=_slices(figures[name], held_out, settings),
        )
        for name, its in metrics.items()
        if name not in failures and scored
    )
    return report.model_copy(
        update={
            "metrics": scores,
            "failures": report.failures
            | {METRIC.format(name): why for name, why in failures.items()},
            "seconds": report.seconds + time.monotonic() - began,
        }
    )


def _slices(
    figures: Mapping[str, NDArray[np.float64]],
    held_out: Sequence[HeldOutDocument],
    settings: EvaluationSettings,
) -> tuple[dict[str, object], ...]:
    """Return rows {slice, name, documents, scores, difference_to}, of the slices that bits per byte
    have."""
    rows = []
    for kind, name, members in slices_of(held_out, settings.slice_values):
        its = {model: figures_D[members] for model, figures_D in figures.items()}
        rows.append({"slice": kind, "name": name, **_plain(compared_means(its, settings))})
    return tuple(rows)


def _plain(means: dict[str, Any]) -> dict[str, Any]:
    """Return ``means`` with intervals as in JSON."""
    return {
        key: {name: its.model_dump() for name, its in found.items()}
        if isinstance(found, dict)
        else found
        for key, found in means.items()
    }


def _are_pairs(held_out: Sequence[HeldOutDocument]) -> bool:
    return all(each.rejected is not None for each in held_out)


class _Outputs:
    """What one model makes of the documents; each is made when it is first needed."""

    def __init__(
        self,
        directory: Path,
        held_out: Sequence[HeldOutDocument],
        tokenizer: Tokenizer | None,
        allowed: AllowedCode,
        context: int,
    ) -> None:
        ways: dict[str, Any] = {"allowed": allowed, "context": context}
        self._open = partial(TextModel.open, directory, tokenizer, **ways)
        self._held_out, self._tokenizer = held_out, tokenizer
        self._made: dict[int, list[MetricSample]] = {}  # by max_new_tokens

    @cached_property
    def _model(self) -> TextModel:
        return self._open()

    def prefers_chosen(self) -> NDArray[np.float64]:
        """Return 1.0 for each pair of which the chosen answer has the higher log-probability, else
        0.0; raises as ``score_transformer``."""
        rejected = [replace(each, conversation=each.rejected) for each in self._held_out]
        chosen_P, rejected_P = (
            np.array([log_probs_N.sum() for _, log_probs_N, _ in found])
            for sides in (self._held_out, rejected)
            for found in (token_figures(self._model, sides, self._tokenizer),)
        )
        return (chosen_P > rejected_P).astype(np.float64)

    def samples(self, max_new_tokens: int) -> list[MetricSample]:
        """Return a sample for each document; raises as ``score_transformer``."""
        if not self._made:
            found = token_figures(self._model, self._held_out, self._tokenizer)
            self._made[0] = [
                MetricSample(
                    name=each.path,
                    text=each.text.decode(errors="replace"),
                    tokens=tokens_N.tolist(),
                    log_probs=log_probs_N.tolist(),
                    correct=correct_N.tolist(),
                )
                for each, (tokens_N, log_probs_N, correct_N) in zip(
                    self._held_out, found, strict=True
                )
            ]
        if max_new_tokens not in self._made:
            self._made[max_new_tokens] = [
                each.model_copy(update=_written(self._model, document, max_new_tokens))
                for each, document in zip(self._made[0], self._held_out, strict=True)
            ]
        return self._made[max_new_tokens]


def _written(model: TextModel, document: HeldOutDocument, max_new_tokens: int) -> dict[str, str]:
    """Return the prompt, what ``model`` writes after it, and what stands there."""
    if (chat := document.conversation) is None:
        prompt = prefix(document.text, len(document.text) // 2)
        reference = document.text[len(prompt) :]
        row = [model.first, *model.encode(prompt).tolist()]
    else:
        at = int(np.flatnonzero(np.diff(chat.mask.astype(np.int8), prepend=0) == 1)[-1])
        row = chat.tokens[:at].tolist() or [model.first]
        prompt = model.tokenizer.text(chat.tokens[:at])
        reference = model.tokenizer.text(chat.tokens[at:][chat.mask[at:]])
    row = row[-max(1, model.context - max_new_tokens) :]
    return {
        "prompt": prompt.decode(errors="replace"),
        "prediction": "".join(generate(model, row, max_tokens=max_new_tokens)),
        "reference": reference.decode(errors="replace"),
    }
