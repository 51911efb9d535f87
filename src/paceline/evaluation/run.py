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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pydantic import ValidationError

from paceline.config import load_runtime, this_node
from paceline.data import (
    ShardCache,
    Snapshot,
    content_digest,
    documents,
    load_snapshot,
    tokenizer_of,
)
from paceline.errors import CorruptData, InvalidInput, PacelineError, PermanentError, SourceMissing
from paceline.evaluation.gate import TRAINING_DATA
from paceline.evaluation.held_out import choose_prefixes
from paceline.evaluation.scoring import score_models
from paceline.manifest import directory_name
from paceline.schemas import EvaluationReport, EvaluationSpec, Overlap, TrainingData
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
    snapshot = _snapshot(spec.snapshot_url, spec.snapshot_digest, store)
    budget = spec.settings.held_out_bytes
    read = [
        (each.path, each.text)
        for each in documents(snapshot, "held-out", store, cache_dir, HELD_OUT_READ_FACTOR * budget)
    ]
    held_out = choose_prefixes(read, budget)
    tokenizer = tokenizer_of(snapshot, store)
    train = [
        each.text
        for each in documents(
            snapshot, "train", store, cache_dir, TRAIN_BYTES, text_of=tokenizer.text
        )
    ]
    with tempfile.TemporaryDirectory(prefix="evaluation-", dir=scratch_dir) as scratch:
        report = score_models(
            {name: _local(name, at, store, Path(scratch)) for name, at in spec.models.items()},
            held_out,
            train,
            spec.settings,
            snapshot_digest=snapshot.digest,
            on_progress=_progress,
            tokenizer=tokenizer,
        )
    began = time.monotonic()
    try:
        overlaps = tuple(_overlap(each, read, store, cache_dir) for each in spec.trained_on)
    except PermanentError as error:  # without a comparison the gate fails, with this reason
        failures = report.failures | {TRAINING_DATA: error.one_line()}
        return report.model_copy(update={"failures": failures})
    seconds = report.seconds + time.monotonic() - began
    return report.model_copy(update={"overlaps": overlaps, "seconds": seconds})


def _snapshot(url: str, digest: str, store: ObjectStore) -> Snapshot:
    snapshot = load_snapshot(url, store)
    if snapshot.digest != digest:
        raise CorruptData(
            "this is not the snapshot that was asked for",
            got=snapshot.digest,
            wanted=digest,
            where=url,
        )
    return snapshot


def _overlap(
    trained_on: TrainingData, held_out: list[tuple[str, bytes]], store: ObjectStore, cache_dir: Path
) -> Overlap:
    """Return how many of ``held_out`` are in the snapshot ``trained_on``."""
    return find_overlap(
        held_out,
        _snapshot(trained_on.snapshot_url, trained_on.snapshot_digest, store),
        store,
        cache_dir,
        quarantined=trained_on.quarantined_shards,
        on_progress=lambda fraction: _progress(0.98, f"training data compared: {fraction:.0%}"),
    )


# Whether held-out documents occur in a candidate's training data.
#
# Two documents are the same if their texts are equal except for white space: a copy under another
# name, in another shard or with other line ends is found. The training split is read shard by
# shard, so that memory holds one shard and 32 bytes a held-out document, whatever the snapshot's
# size.

EXAMPLES = 5


def find_overlap(
    held_out: Iterable[tuple[str, bytes]],
    training: Snapshot,
    store: ObjectStore,
    cache_dir: Path,
    *,
    quarantined: Sequence[str] = (),
    on_progress: Callable[[float], None] = lambda _fraction: None,
) -> Overlap:
    """Return how many of ``held_out`` (key, text) are in the training split of ``training``.

    Shards in ``quarantined`` were not used in training and are left out; any other unreadable shard
    raises CorruptData. Samples of a tokenised snapshot are compared as the text that their tokens
    decode to.
    """
    tokenizer = tokenizer_of(training, store)
    keys: dict[bytes, list[str]] = {}
    compared = 0
    for key, text in held_out:
        if not text.strip():
            continue  # nothing to predict, and equal for every sample without text
        compared += 1
        (tokens,) = tokenizer.encode([text])
        digests = {content_digest(text)}
        if not isinstance(tokens, str):  # a string: the tokenizer fails, so no shard has it
            # What the tokenizer drops (case, rare letters) is missing on both sides.
            digests.add(content_digest(tokenizer.text(tokens)))
        for digest in digests:
            keys.setdefault(digest, []).append(key)
    left = {key for found in keys.values() for key in found}
    examples: list[str] = []
    shards = [each for each in training.of_split("train") if each.sha256 not in set(quarantined)]
    with ShardCache(training, store, cache_dir) as cache:
        for number, (_, samples) in enumerate(cache.opened(shards), start=1):
            if isinstance(samples, CorruptData):
                raise samples
            for i in range(len(samples)):
                digest = content_digest(tokenizer.text(samples.tokens(i)))
                for key in keys.get(digest, ()):
                    if key in left:
                        left.remove(key)
                        examples.append(f"{key} = {samples.key(i)}")
            on_progress(number / len(shards))
    return Overlap(
        snapshot_digest=training.digest,
        held_out_documents=compared,
        training_documents=sum(each.documents for each in shards),
        found=len(examples),
        examples=tuple(examples[:EXAMPLES]),
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
    _emit("result", report.model_dump(mode="json"))
    return 0


def _local(name: str, where: str, store: ObjectStore, scratch: Path) -> Path:
    """Return a local directory with the model; downloads it from object storage if needed."""
    if where.startswith("node:"):
        model_id, _, version = where.removeprefix("node:").rpartition("/")
        return this_node().directory / "store" / "models" / directory_name(model_id) / version
    if not where.startswith("s3://"):
        return Path(where)
    return download_model(where, scratch / name, store)


def download_model(where: str, directory: Path, store: ObjectStore) -> Path:
    """Download the files of the model at ``where`` (``s3://bucket/prefix``) into a new
    ``directory``, and return that. Raises SourceMissing where there are none."""
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
    _emit("progress", {"fraction": round(fraction, 4), "message": message})


def _fail(error: PacelineError) -> int:
    _emit("failed", {"code": error.code, "message": error.one_line()})
    sys.stderr.write(error.one_line() + "\n")
    return error.exit_code


def _emit(event: str, data: dict[str, object]) -> None:
    sys.stdout.write(json.dumps({"event": event, "data": data}, allow_nan=False) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
