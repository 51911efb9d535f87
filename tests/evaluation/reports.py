"""Reports for the gate's tests: whole and passing, to be broken one way at a time."""

from __future__ import annotations

from typing import Any

from paceline.schemas import EvaluationReport, Interval, ModelScore, Overlap

SNAPSHOT = "5" * 64
TRAINING_SNAPSHOT = "7" * 64
CLEAN = Overlap(
    snapshot_digest=TRAINING_SNAPSHOT,
    held_out_documents=40,
    training_documents=400,
    found=0,
    overlapping=2,
)
SIZES = {"bytes": 8_000_000, "file_bytes": 8_000_000}  # of a packaged candidate
LINEAGE: dict[str, str | None] = {
    "manifest_digest": "a" * 64,
    "snapshot_digest": SNAPSHOT,
    "training_snapshot_digest": TRAINING_SNAPSHOT,
    "weights_digest": "c" * 64,
    "config_digest": "c" * 64,
    "code_version": "paceline 0.1.0",
    "job_id": "job-1",
}


def interval(value: float, half: float = 0.05) -> Interval:
    return Interval(value=value, low=value - half, high=value + half)


GAINS = {"base": interval(-0.4).model_dump(), "champion": interval(-0.1).model_dump()}


def transformer(name: str, bits: float, **changes: Any) -> ModelScore:
    facts: dict[str, Any] = {
        "name": name,
        "kind": "transformer",
        "bits_per_byte": interval(bits),
        "latency_ms": 20.0,
        "weights_digest": name[0] * 64,
        "dtype": "float32",
        "format": "safetensors",
        "model_bytes": 8_000_000,
    }
    return ModelScore(**facts | changes)


def passing(**changes: Any) -> EvaluationReport:
    """Return a report whose candidate passes; ``changes`` replace the candidate's fields."""
    gains = {"base": interval(-0.4), "champion": interval(-0.1), "ngram": interval(0.3)}
    candidate = transformer("candidate", 2.4, **{"difference_to": gains} | changes)
    ngram = ModelScore(name="ngram", kind="ngram", bits_per_byte=interval(2.1))
    return EvaluationReport(
        snapshot_digest=SNAPSHOT,
        documents=40,
        bytes=100_000,
        scores=(candidate, transformer("base", 2.8), transformer("champion", 2.5), ngram),
        slices=(
            {"slice": "size", "name": "1 to 900 bytes", "documents": 20, "bytes": 9000,
             "bits_per_byte": {"candidate": 2.5, "base": 2.9, "champion": 2.6, "ngram": 2.2},
             "difference_to": GAINS},
            {"slice": "size", "name": "901 to 9000 bytes", "documents": 20, "bytes": 91_000,
             "bits_per_byte": {"candidate": 2.3, "base": 2.7, "champion": 2.4, "ngram": 2.0},
             "difference_to": GAINS},
        ),
        seconds=1.0,
        overlaps=(CLEAN,),
    )  # fmt: skip
