"""Score several models on the same bytes and compare them in pairs.

Does not depend on where documents and model directories come from; ``run`` provides them.

Confidence intervals are bootstrapped over documents (Efron 1979; paired as in Koehn 2004). A figure
is Σ bits / Σ bytes. Documents are drawn with replacement; all models share the draws, so that a
difference between two models is paired document by document. Percentile intervals.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.config import EvaluationSettings
from paceline.data import Tokenizer
from paceline.errors import CorruptData, PermanentError
from paceline.evaluation import baselines as ngram
from paceline.evaluation.baselines import COMPRESSORS, compressed_bits
from paceline.evaluation.held_out import HeldOutDocument, slice_rows
from paceline.evaluation.text_model import AllowedCode, Ranks
from paceline.evaluation.transformer import MILLION, score_transformer
from paceline.models import local_model_digest
from paceline.schemas import EvaluationReport, Interval, ModelScore, RecordedScore

log = logging.getLogger(__name__)
Reals = NDArray[np.float64]

_ROWS = 128  # draws held in memory at once


class Resampler:
    """A fixed set of bootstrap draws over documents of ``sizes`` bytes."""

    def __init__(self, sizes: Reals, *, samples: int, confidence: float, seed: int) -> None:
        assert len(sizes) and (sizes > 0).all(), "held-out documents are never empty"
        self._sizes = np.asarray(sizes, dtype=np.float64)
        self._samples, self._seed = samples, seed
        tail = (1 - confidence) / 2
        self._quantiles = (tail, 1 - tail)

    def ratio(self, bits: Reals) -> Interval:
        """Return Σ ``bits`` / Σ bytes with its interval; ``bits`` may be a paired difference."""
        estimates = self.draw(np.asarray(bits, dtype=np.float64)[None, :])[0]
        low, high = np.quantile(estimates, self._quantiles)
        value = float(bits.sum() / self._sizes.sum())
        # With few documents percentiles may miss the estimate itself; extend the interval to
        # contain it.
        return Interval(value=value, low=min(value, float(low)), high=max(value, float(high)))

    def draw(self, bits_MD: Reals) -> Reals:
        """Return M figures under each draw, (M, samples); all share the draws."""
        random = np.random.default_rng(self._seed)
        count = len(self._sizes)
        even = np.full(count, 1 / count)
        estimates = []
        for start in range(0, self._samples, _ROWS):
            rows = min(_ROWS, self._samples - start)
            weights_SD = random.multinomial(count, even, size=rows).astype(np.float64)
            estimates.append(bits_MD @ weights_SD.T / (weights_SD @ self._sizes))
        return np.concatenate(estimates, axis=1)


def _resampler(sizes: Reals, settings: EvaluationSettings) -> Resampler:
    return Resampler(
        sizes,
        samples=settings.bootstrap_samples,
        confidence=settings.confidence,
        seed=settings.seed,
    )


def compared_means(
    by_model: Mapping[str, Sequence[float] | Reals], settings: EvaluationSettings
) -> dict[str, Any]:
    """Return of figures, one a document, ``documents``, each model's mean (``scores``) and the
    candidate's paired ``difference_to`` the others, as intervals."""
    figures = {name: np.array(each, dtype=np.float64) for name, each in by_model.items()}
    count = len(next(iter(figures.values())))
    resampler = _resampler(np.ones(count), settings)
    gains: dict[str, Interval] = {}
    if (own := figures.get("candidate")) is not None:
        others = {name: each for name, each in figures.items() if name != "candidate"}
        gains = {name: resampler.ratio(own - each) for name, each in others.items()}
    return {
        "documents": count,
        "scores": {name: resampler.ratio(each) for name, each in figures.items()},
        "difference_to": gains,
    }


OnProgress = Callable[[float, str], None]

NGRAM = "ngram"


OnScored = Callable[[str, Reals, Mapping[str, Any]], None]


ScoreKind = Literal["transformer", "ngram", "compressor"]


@dataclass(frozen=True, kw_only=True)
class _Scored:
    kind: ScoreKind
    bits: Reals  # one figure a document
    facts: Mapping[str, Any]  # fields of ModelScore that only served models have


def ngram_subject(settings: EvaluationSettings) -> str:
    """Return the name under which the n-gram model's score is recorded."""
    return f"{NGRAM} of order {settings.ngram_order}"


def score_models(
    models: Mapping[str, Path],
    held_out: Sequence[HeldOutDocument],
    train: Callable[[], Sequence[bytes]],
    settings: EvaluationSettings,
    *,
    snapshot_digest: str,
    on_progress: OnProgress,
    tokenizer: Tokenizer | None = None,
    allowed: AllowedCode | None = None,
    known: Sequence[RecordedScore] = (),
    on_scored: OnScored = lambda _subject, _bits, _facts: None,
    on_rows: OnScored | None = None,
    on_models_scored: Callable[[], None] = lambda: None,
    failed: Mapping[str, str] = MappingProxyType({}),
) -> EvaluationReport:
    """Return every model's score on ``held_out``, with paired gains over all the others.

    ``train`` returns the training text, if it is needed. Each model reads the text by its own
    tokenizer; ``tokenizer`` is the snapshot's, for models that carry none, and ``allowed`` the user
    code that may run (None: none). Of conversations only what assistants say is scored: models see
    what precedes it, the baselines do not. A model that
    cannot be scored (wrong format, NaN, a tokenizer that loses text) has no score and an entry in
    ``failures``. ``known`` scores on the same documents, found by the digest of the model's files,
    are not computed again; each new one is passed to ``on_scored`` (subject, bits by document,
    facts), and while a model is scored what it has so far to ``on_rows``: an unfinished one among
    ``known`` goes on from there. A model in ``failed`` (name → reason) is not tried.
    ``on_models_scored`` may start what would disturb the measurement of latency.
    """
    began = time.monotonic()
    scored: dict[str, _Scored] = {}
    failures = dict(failed)
    texts = [each.text for each in held_out]
    once = _Once(known, on_scored)
    for number, (name, directory) in enumerate(models.items()):
        if name in failures:
            continue

        def show(fraction: float, number: int = number, name: str = name) -> None:
            on_progress(0.9 * (number + fraction) / len(models), f"{name}: {fraction:.0%}")

        def score(subject: str, directory: Path = directory, show: Any = show) -> _Found:
            scored = score_transformer(
                directory, held_out, show, tokenizer, allowed, None, settings,
                _begun(known, subject), on_rows and partial(on_rows, subject),
            )  # fmt: skip
            return scored.split()

        try:
            subject = local_model_digest(directory)
            scored[name] = once("transformer", subject, partial(score, subject))
        except PermanentError as error:
            failures[name] = error.one_line()

    on_models_scored()
    scored |= _baselines(once, train, texts, settings, on_progress)
    sizes_D = np.array([len(text) for text in texts], dtype=np.float64)
    return EvaluationReport(
        snapshot_digest=snapshot_digest,
        documents=len(held_out),
        bytes=int(sizes_D.sum()),
        scores=_scores(scored, sizes_D, settings),
        slices=slice_rows(
            {name: each.bits for name, each in scored.items()},
            held_out,
            lambda bits_D, sizes_D: _resampler(sizes_D, settings).ratio(bits_D),
            settings.slice_values,
        ),
        failures=failures,
        seconds=time.monotonic() - began,
        of_assistants=any(each.conversation is not None for each in held_out),
    )


_Found = tuple[Reals, Mapping[str, Any]]  # bits by document, facts


def _begun(known: Sequence[RecordedScore], subject: str) -> RecordedScore | None:
    return next((each for each in known if each.unfinished and each.subject == subject), None)


class _Once:
    """Scores each subject once: base and champion are often the same."""

    def __init__(self, known: Sequence[RecordedScore], on_scored: OnScored) -> None:
        self._known: dict[str, _Found] = {
            each.subject: (np.array(each.bits), each.facts) for each in known if not each.unfinished
        }
        self._on_scored = on_scored

    def __call__(self, kind: ScoreKind, subject: str, score: Callable[[], _Found]) -> _Scored:
        if subject not in self._known:
            self._known[subject] = score()
            self._on_scored(subject, *self._known[subject])
        bits_D, facts = self._known[subject]
        return _Scored(kind=kind, bits=bits_D, facts=facts)


def _baselines(
    once: _Once,
    train: Callable[[], Sequence[bytes]],
    texts: Sequence[bytes],
    settings: EvaluationSettings,
    on_progress: OnProgress,
) -> dict[str, _Scored]:
    """Return the scores of the n-gram model of ``train``'s text, and of the compressors."""

    def count_grams() -> _Found:
        training_texts = train()
        on_progress(0.92, f"{NGRAM}: counting {sum(map(len, training_texts))} bytes")
        return _ngram_bits(training_texts, texts, settings.ngram_order), {}

    scored = {NGRAM: once("ngram", ngram_subject(settings), count_grams)}
    for name in COMPRESSORS:

        def compress(name: str = name) -> _Found:
            on_progress(0.97, name)
            return np.array([compressed_bits(name, text) for text in texts]), {}

        scored[name] = once("compressor", name, compress)
    return scored


def score_share(
    models: Mapping[str, Path],
    held_out: Sequence[HeldOutDocument],
    tokenizer: Tokenizer,
    on_scored: OnScored,
    on_progress: OnProgress,
    settings: EvaluationSettings,
    allowed: AllowedCode | None = None,
    ranks: Ranks | None = None,
    known: Sequence[RecordedScore] = (),
    on_failed: Callable[[str, PermanentError], None] = lambda _name, _error: None,
    on_rows: OnScored | None = None,
) -> None:
    """Score each model on a share of the documents, or all of ``ranks`` on all of them, and pass
    that to ``on_scored``.

    Leaves out what cannot be scored: ``on_failed`` gets it, and without ranks the evaluation of all
    documents names it. ``known`` and ``on_rows``: as of ``score_models``.
    """
    done = {each.subject for each in known if not each.unfinished}
    for number, (name, directory) in enumerate(models.items()):

        def show(fraction: float, number: int = number, name: str = name) -> None:
            on_progress((number + fraction) / len(models), f"{name}: {fraction:.0%}")

        try:
            subject = _agreed_digest(directory, ranks)
            if subject in done:
                continue
            scored = score_transformer(
                directory, held_out, show, tokenizer, allowed, ranks, settings,
                _begun(known, subject), on_rows and partial(on_rows, subject),
            )  # fmt: skip
            done.add(subject)
        except PermanentError as error:
            log.warning("not scored model=%s: %s", name, error.one_line())
            on_failed(name, error)
            continue
        on_scored(subject, *scored.split())


def _agreed_digest(directory: Path, ranks: Ranks | None) -> str:
    """Return the digest of the model in ``directory``; raises CorruptData unless every node of
    ``ranks`` has the same one."""
    subject, error = "", None
    try:
        subject = local_model_digest(directory)
    except PermanentError as found:
        error = found
    if ranks is None:
        if error is not None:
            raise error
        return subject
    ranks.agree(error)
    value = int(subject[:9], 16)  # few digits: the sum is exact
    count, total = ranks.everyone([1, value])
    odd = CorruptData(
        "nodes hold different models", got=subject, wanted="one digest", where=directory
    )
    ranks.agree(odd if total != count * value else None)
    return subject


def _ngram_bits(train: Sequence[bytes], texts: Sequence[bytes], order: int) -> Reals:
    model = ngram.fit(train, order)
    return np.array([float(model.bits(text).sum()) for text in texts])


def _by_token(bits_D: Reals, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``facts`` with the figures of its own tokens, which do not compare with those of
    another tokenizer: perplexity, accuracy, and the expected calibration error over ten bins."""
    found = dict(facts)
    bins = np.array(found.pop("calibration", ()), dtype=np.float64)
    if bins.size and (tokens := float(bins[:, 0].sum())):
        found["perplexity"] = float(2.0 ** min(1000.0, bits_D.sum() / tokens))
        found["token_accuracy"] = float(bins[:, 1].sum() / tokens)
        apart = np.abs(bins[:, 1] - bins[:, 2] / MILLION)
        found["calibration_error"] = float(apart.sum() / tokens)
    return found


def _scores(
    scored: Mapping[str, _Scored], sizes_D: Reals, settings: EvaluationSettings
) -> tuple[ModelScore, ...]:
    resampler = _resampler(sizes_D, settings)
    found = []
    for name, each in scored.items():
        found.append(
            ModelScore(
                name=name,
                kind=each.kind,
                bits_per_byte=resampler.ratio(each.bits),
                difference_to={
                    other: resampler.ratio(each.bits - its.bits)
                    for other, its in scored.items()
                    if other != name and each.kind == "transformer"
                },
                **_by_token(each.bits, each.facts),
            )
        )
    return tuple(found)
