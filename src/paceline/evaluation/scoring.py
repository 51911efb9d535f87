"""One report out of many models: everything is scored on the same bytes and compared in pairs.

``judge`` knows documents and directories; where they come from is ``run``'s business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PermanentError
from paceline.evaluation import ngram
from paceline.evaluation.compressors import COMPRESSORS, compressed_bits
from paceline.evaluation.heldout import HeldOutDocument
from paceline.evaluation.intervals import Resampler
from paceline.evaluation.slices import slice_rows
from paceline.evaluation.transformer import TransformerScore, score
from paceline.models import weights_digest
from paceline.profile import EvaluationSettings
from paceline.wire.training import EvaluationReport, ModelScore

Reals = NDArray[np.float64]
OnProgress = Callable[[float, str], None]

NGRAM = "ngram"


@dataclass(frozen=True, kw_only=True)
class _Scored:
    kind: Literal["transformer", "ngram", "compressor"]
    bits: Reals  # one figure a document
    facts: Mapping[str, Any]  # what ModelScore says of a model that is served


def judge(
    models: Mapping[str, Path],
    held_out: Sequence[HeldOutDocument],
    train: Sequence[bytes],
    settings: EvaluationSettings,
    *,
    snapshot_digest: str,
    on_progress: OnProgress,
) -> EvaluationReport:
    """Return every model's score on ``held_out``, with paired gains over all the others.

    A model that cannot be judged (wrong format, NaN) has no score and a line in ``failures``.
    """
    began = time.monotonic()
    scored: dict[str, _Scored] = {}
    failures: dict[str, str] = {}
    by_digest: dict[str, TransformerScore] = {}
    texts = [each.text for each in held_out]
    for number, (name, directory) in enumerate(models.items()):

        def show(fraction: float, number: int = number, name: str = name) -> None:
            on_progress(0.9 * (number + fraction) / len(models), f"{name}: {fraction:.0%}")

        try:
            found = _score_once(directory, texts, by_digest, show)
        except PermanentError as error:
            failures[name] = error.one_line()
            continue
        scored[name] = _Scored(kind="transformer", bits=found.bits, facts=_facts(found))
    on_progress(0.92, f"{NGRAM}: counting {sum(map(len, train))} bytes")
    scored[NGRAM] = _Scored(
        kind="ngram", bits=_ngram_bits(train, texts, settings.ngram_order), facts={}
    )
    for name in COMPRESSORS:
        on_progress(0.97, name)
        bits_D = np.array([compressed_bits(name, text) for text in texts])
        scored[name] = _Scored(kind="compressor", bits=bits_D, facts={})
    sizes_D = np.array([len(text) for text in texts], dtype=np.float64)
    return EvaluationReport(
        snapshot_digest=snapshot_digest,
        documents=len(held_out),
        bytes=int(sizes_D.sum()),
        scores=_scores(scored, sizes_D, settings),
        slices=slice_rows({name: each.bits for name, each in scored.items()}, held_out),
        failures=failures,
        seconds=time.monotonic() - began,
    )


def _score_once(
    directory: Path,
    texts: Sequence[bytes],
    by_digest: dict[str, TransformerScore],
    show: Callable[[float], None],
) -> TransformerScore:
    digest = weights_digest(directory)  # base and champion are often the same weights
    if digest not in by_digest:
        by_digest[digest] = score(directory, texts, show)
    return by_digest[digest]


def _facts(found: TransformerScore) -> dict[str, Any]:
    return {
        "latency_ms": found.latency_ms,
        "weights_digest": found.weights_digest,
        "dtype": found.dtype,
        "format": found.format,
        "model_bytes": found.model_bytes,
    }


def _ngram_bits(train: Sequence[bytes], texts: Sequence[bytes], order: int) -> Reals:
    model = ngram.fit(train, order)
    return np.array([float(model.bits(text).sum()) for text in texts])


def _scores(
    scored: Mapping[str, _Scored], sizes_D: Reals, settings: EvaluationSettings
) -> tuple[ModelScore, ...]:
    resampler = Resampler(
        sizes_D,
        samples=settings.bootstrap_samples,
        confidence=settings.confidence,
        seed=settings.seed,
    )
    found = []
    for name, each in scored.items():
        found.append(
            ModelScore(
                name=name,
                kind=each.kind,
                bits_per_byte=resampler.ratio(each.bits),
                gain_over={
                    other: resampler.ratio(each.bits - its.bits)
                    for other, its in scored.items()
                    if other != name and each.kind == "transformer"
                },
                **each.facts,
            )
        )
    return tuple(found)
