"""The evaluation process: ``python -m paceline.evaluation.run`` on a node, killable by its caller.

Reads an EvaluationSpec (JSON) from standard input. Writes JSON lines to standard output:
``{"event": "progress", "data": {"fraction", "message"}}`` and at the end one
``{"event": "result", "data": EvaluationReport}``, or ``{"event": "failed", "data": {"code",
"message"}}`` and a nonzero exit code.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from pydantic import ValidationError

from paceline.config import load_runtime
from paceline.data import documents, load_snapshot
from paceline.errors import CorruptData, InvalidInput, PacelineError, PermanentError, SourceMissing
from paceline.evaluation.gate import TRAINING_DATA
from paceline.evaluation.held_out import choose
from paceline.evaluation.overlap import overlap
from paceline.evaluation.scoring import judge
from paceline.schemas.training import EvaluationReport, EvaluationSpec, Overlap, TrainingData
from paceline.storage import ObjectStore

TRAIN_BYTES = 16 * 1024 * 1024  # of training text for the n-gram model: about 4 s on one core
HELD_OUT_READ_FACTOR = 64  # times the budget: maximum text read to cut prefixes from


def evaluate(spec: EvaluationSpec) -> EvaluationReport:
    """Return the report on ``spec``'s models; writes progress to standard output."""
    runtime = load_runtime(spec.state_dir)
    store = ObjectStore.from_runtime(runtime)
    cache_dir = runtime.state_dir / "cache"
    scratch_dir = runtime.state_dir / "work"
    scratch_dir.mkdir(parents=True, exist_ok=True)
    snapshot = load_snapshot(spec.snapshot_url, store)
    if snapshot.digest != spec.snapshot_digest:
        raise CorruptData(
            "this is not the snapshot that was asked for",
            got=snapshot.digest,
            wanted=spec.snapshot_digest,
            where=spec.snapshot_url,
        )
    budget = spec.settings.held_out_bytes
    read = [
        (each.path, each.text)
        for each in documents(snapshot, "held-out", store, cache_dir, HELD_OUT_READ_FACTOR * budget)
    ]
    held_out = choose(read, budget)
    train = [each.text for each in documents(snapshot, "train", store, cache_dir, TRAIN_BYTES)]
    with ExitStack() as stack:
        scratch = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="evaluation-", dir=scratch_dir))
        )
        directories = {
            name: _local(name, where, store, scratch) for name, where in spec.models.items()
        }
        report = judge(
            directories,
            held_out,
            train,
            spec.settings,
            snapshot_digest=snapshot.digest,
            on_progress=_progress,
        )
    began = time.monotonic()
    try:
        overlaps = tuple(_overlap(each, read, store, cache_dir) for each in spec.trained_on)
    except PermanentError as error:  # without a comparison the gate fails, with this reason
        failures = report.failures | {TRAINING_DATA: error.one_line()}
        return report.model_copy(update={"failures": failures})
    seconds = report.seconds + time.monotonic() - began
    return report.model_copy(update={"overlaps": overlaps, "seconds": seconds})


def _overlap(
    trained_on: TrainingData, held_out: list[tuple[str, bytes]], store: ObjectStore, cache_dir: Path
) -> Overlap:
    """Return how many of ``held_out`` are in the snapshot ``trained_on``."""
    snapshot = load_snapshot(trained_on.snapshot_url, store)
    if snapshot.digest != trained_on.snapshot_digest:
        raise CorruptData(
            "this is not the snapshot that was trained on",
            got=snapshot.digest,
            wanted=trained_on.snapshot_digest,
            where=trained_on.snapshot_url,
        )
    return overlap(
        held_out,
        snapshot,
        store,
        cache_dir,
        quarantined=trained_on.quarantined_shards,
        on_progress=lambda fraction: _progress(0.98, f"training data compared: {fraction:.0%}"),
    )


def main() -> int:
    """Evaluate the spec on standard input; return the process's exit code."""
    try:
        spec = EvaluationSpec.model_validate_json(sys.stdin.buffer.read())
    except ValidationError as error:
        return _fail(InvalidInput("not an evaluation spec", got=str(error).splitlines()[0:3]))
    try:
        report = evaluate(spec)
    except PacelineError as error:
        return _fail(error)
    _say("result", report.model_dump(mode="json"))
    return 0


def _local(name: str, where: str, store: ObjectStore, scratch: Path) -> Path:
    """Return a local directory with the model; downloads it from object storage if needed."""
    if not where.startswith("s3://"):
        return Path(where)
    directory = scratch / name
    directory.mkdir()
    prefix = where.rstrip("/") + "/"
    found = store.list(prefix)
    if not found:
        raise SourceMissing("no model here", got="no objects", where=where)
    for item in found:
        relative = item.url.removeprefix(prefix)
        if "/" in relative:
            continue  # a model has no subdirectories; skip checkpoints below it
        store.download_file(item.url, directory / relative)
    return directory


def _progress(fraction: float, message: str) -> None:
    _say("progress", {"fraction": round(fraction, 4), "message": message})


def _fail(error: PacelineError) -> int:
    _say("failed", {"code": error.code, "message": error.one_line()})
    sys.stderr.write(error.one_line() + "\n")
    return error.exit_code


def _say(event: str, data: dict[str, object]) -> None:
    sys.stdout.write(json.dumps({"event": event, "data": data}, allow_nan=False) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
