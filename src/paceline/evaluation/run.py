"""The evaluation process: ``python -m paceline.evaluation.run`` on a node, killable by its caller.

Reads an EvaluationSpec (JSON) from standard input. Writes JSON lines to standard output:
``{"event": "progress", "data": {"fraction", "message"}}``, ``{"event": "score", "data":
RecordedScore}`` for each model and baseline that was not scored before, and at the end one
``{"event": "result", "data": EvaluationReport}`` (not for a share of the documents), or
``{"event": "failed", "data": {"code", "message"}}`` and a nonzero exit code. ``score_on_ranks``
does the models' part of it on the ranks of a gang, which hold each model together.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from paceline.config import (
    PREFERENCE_ACCURACY,
    EvaluationSettings,
    Runtime,
    load_runtime,
    this_node,
)
from paceline.data import (
    Snapshot,
    Tokenizer,
    documents,
    load_snapshot,
    snapshot_template,
    tokenizer_of,
)
from paceline.errors import CorruptData, InvalidInput, PacelineError, PermanentError, SourceMissing
from paceline.evaluation.gate import METRIC, TRAINING_DATA
from paceline.evaluation.held_out import read_held_out, share_of
from paceline.evaluation.overlap import Rows, find_overlap
from paceline.evaluation.scoring import score_models, score_share
from paceline.evaluation.tasks import Figures, score_tasks, task_rows
from paceline.evaluation.text_model import AllowedCode, Ranks
from paceline.evaluation.user_code import with_metrics
from paceline.extras import is_installed
from paceline.manifest import directory_name, fetch_manifest, verify_directory
from paceline.models import read_user_code
from paceline.schemas import (
    EvaluationReport,
    EvaluationSpec,
    Overlap,
    RecordedScore,
)
from paceline.storage import ObjectStore, open_store

TRAIN_BYTES = 16 * 1024 * 1024  # of training text for the n-gram model: about 4 s on one core
MOST_RECORDED = 150_000  # documents, in a line of 4 MiB
MOST_ON_RANKS = 40_000  # documents, in a rank's line of 1 MiB
SCRATCH = "scores-"  # prefix of the directories for downloaded models, which their users lock
_writing = threading.Lock()


def evaluate(spec: EvaluationSpec) -> EvaluationReport | None:
    """Return the report on ``spec``'s models, of a share None; writes progress and scores to
    standard output."""
    runtime = load_runtime(spec.state_dir)
    store = ObjectStore.from_runtime(runtime)
    sources = runtime.profile.security.code_sources
    allowed = AllowedCode(sources, runtime.state_dir / "code")
    cache_dir = runtime.state_dir / "cache"
    scratch_dir = runtime.state_dir / "work"
    snapshot = _snapshot(spec.snapshot_url, spec.snapshot_digest, store)
    tokenizer = tokenizer_of(snapshot, store)
    held_out, read, answers = read_held_out(snapshot, tokenizer, store, cache_dir, spec.settings)

    def on_scored(
        subject: str, bits_D: NDArray[np.float64], facts: Mapping[str, Any], **more: bool
    ) -> None:
        if spec.scorer and len(bits_D) <= MOST_RECORDED:
            _emit("score", _record(spec, subject, bits_D, facts, **more))

    on_rows = partial(on_scored, unfinished=True)

    def on_metric(subject: str, digest: str, figures_D: NDArray[np.float64]) -> None:
        if spec.scorer and len(figures_D) <= MOST_RECORDED:
            of_metric = spec.model_copy(update={"snapshot_digest": digest})
            _emit("score", _record(of_metric, subject, figures_D, {}))

    if spec.trained_on and is_installed("transformers"):
        import_module("transformers")  # not in two threads at once: one gets an unfinished module
    with (
        _scratch_below(scratch_dir) as scratch,
        ThreadPoolExecutor(1) as beside,  # baselines take one core
    ):
        models = {name: _local(name, at, store, scratch) for name, at in spec.models.items()}
        if spec.share is not None:
            part = share_of(held_out, *spec.share)
            score_share(
                models, part, tokenizer, on_scored, _progress, spec.settings, allowed,
                known=spec.known, on_rows=on_rows,
            )  # fmt: skip
            return None
        tasks = _tasks_directory(spec, store, scratch) if spec.tasks_url else None
        rows = task_rows(tasks, scratch) if tasks and spec.trained_on else {}
        compared: list[Future[tuple[Overlap, ...]]] = []
        compare_with = (spec, snapshot, read, answers, rows, store, cache_dir)
        report = score_models(
            models,
            held_out,
            lambda: _training_texts(snapshot, tokenizer, store, cache_dir),
            spec.settings,
            snapshot_digest=snapshot.digest,
            on_progress=_progress,
            tokenizer=tokenizer,
            allowed=allowed,
            known=[
                each
                for each in spec.known
                if each.snapshot_digest == snapshot.digest
                and (each.unfinished or len(each.bits) == len(held_out))
            ],
            on_scored=on_scored,
            on_rows=on_rows,
            on_models_scored=lambda: compared.append(beside.submit(_overlaps, *compare_with)),
            failed=spec.failures,
        )
        if tasks:
            report = _with_tasks(report, spec, models, tasks, scratch, allowed)
        on_ranks = spec.mesh.ranks_per_replica > 1 and not spec.settings.metrics
        if on_ranks and snapshot.is_paired:
            why = {METRIC.format(PREFERENCE_ACCURACY): "no process holds the model whole"}
            report = report.model_copy(update={"failures": report.failures | why})
        elif not on_ranks:
            report = with_metrics(
                report,
                models,
                held_out,
                spec.settings,
                allowed,
                tokenizer,
                on_progress=lambda part, message: _progress(0.9 + 0.08 * part, message),
                known=[each for each in spec.known if len(each.bits) == len(held_out)],
                on_scored=on_metric,
            )
        began = time.monotonic()
        try:
            overlaps = compared[0].result()
        except PermanentError as error:  # without a comparison the gate fails, with this reason
            failures = report.failures | {TRAINING_DATA: error.one_line()}
            return report.model_copy(update={"failures": failures})
    seconds = report.seconds + time.monotonic() - began
    return report.model_copy(update={"overlaps": overlaps, "seconds": seconds})


@contextlib.contextmanager
def _scratch_below(parent: Path, name: str = "") -> Iterator[Path]:
    """Yield a directory for models, named so or new; those of killed evaluations are removed."""
    scratch = parent / f"{SCRATCH}{name or uuid4().hex}"
    parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        with (parent / "evaluation.lock").open("a") as one_at_a_time:
            _lock(one_at_a_time.fileno(), fcntl.LOCK_EX)
            for each in parent.glob(f"{SCRATCH}*"):
                with contextlib.suppress(FileNotFoundError):  # its evaluation ends just now
                    left = os.open(each, os.O_RDONLY)
                    if _lock(left, fcntl.LOCK_EX | fcntl.LOCK_NB):
                        shutil.rmtree(each, ignore_errors=True)
                    os.close(left)
            scratch.mkdir(exist_ok=True)
            mine = os.open(scratch, os.O_RDONLY)
            stack.callback(os.close, mine)
            stack.callback(shutil.rmtree, scratch, ignore_errors=True)
            _lock(mine, fcntl.LOCK_EX)
        yield scratch


def _lock(descriptor: int, how: int) -> bool:
    """Return whether the file is locked; a file system without such locks has none to remove."""
    try:
        fcntl.flock(descriptor, how)
    except OSError:  # another evaluation has it, or NFS
        return False
    return True


def score_on_ranks(
    spec: EvaluationSpec,
    ranks: Ranks,
    node: str,
    *,
    is_first: bool,
    emit: Callable[[str, dict[str, Any]], None],
) -> None:
    """Score ``spec``'s models on all held-out documents, as one of ``ranks``; ``emit`` gets
    ("score", RecordedScore), ("unscored", model and reason) and ("step", progress).

    The first rank of ``node`` (``is_first``) downloads models. A model of user code is left to the
    evaluation's own process. Raises what reading the data raises, and InvalidInput for more
    documents than a rank reports.
    """
    runtime = load_runtime(spec.state_dir)
    work_dir, name = runtime.state_dir / "work", f"{spec.run_id}-{node}"
    at = work_dir / f"{SCRATCH}{name}"
    with _scratch_below(work_dir, name) if is_first else contextlib.nullcontext(at) as directory:
        _score_on_ranks(spec, runtime, ranks, directory, is_first, emit)
        ranks.everyone([0.0])  # all have read the files


def _score_on_ranks(
    spec: EvaluationSpec,
    runtime: Runtime,
    ranks: Ranks,
    directory: Path,
    is_first: bool,
    emit: Callable[[str, dict[str, Any]], None],
) -> None:
    store, cache_dir = open_store(runtime), runtime.state_dir / "cache"
    snapshot = _snapshot(spec.snapshot_url, spec.snapshot_digest, store)
    tokenizer = tokenizer_of(snapshot, store)
    held_out, _, _ = read_held_out(snapshot, tokenizer, store, cache_dir, spec.settings)
    if len(held_out) > MOST_ON_RANKS:
        raise InvalidInput(
            "more held-out documents than ranks report",
            got=len(held_out),
            wanted=f"at most {MOST_ON_RANKS}",
            where="evaluation.held_out_bytes",
            do="Lower it, or judge without --ranks (evaluation.ranks).",
        )
    models: dict[str, Path] = {}
    for name, at in spec.models.items():
        if name in spec.failures:
            continue
        error = None
        try:
            downloads = at.startswith("s3://") and not is_first
            models[name] = directory / name if downloads else _local(name, at, store, directory)
        except PacelineError as found:
            error = found
        ranks.agree(error)  # also waits for the node's download
        if (of_user := read_user_code(models[name])) is not None:
            emit("unscored", {"model": name, "code_ref": of_user.code_ref})
            del models[name]

    def on_failed(name: str, error: PermanentError) -> None:
        emit("unscored", {"model": name, "reason": error.one_line()})

    def on_rows(subject: str, bits_R: NDArray[np.float64], facts: Mapping[str, Any]) -> None:
        if len(bits_R) <= MOST_ON_RANKS:
            emit("score", _record(spec, subject, bits_R, facts, unfinished=True))

    score_share(
        models,
        held_out,
        tokenizer,
        lambda *scored: emit("score", _record(spec, *scored)),
        lambda fraction, message: emit("step", {"fraction": fraction, "message": message}),
        spec.settings,
        ranks=ranks,
        known=spec.known,
        on_failed=on_failed,
        on_rows=on_rows,
    )


def _record(
    spec: EvaluationSpec,
    subject: str,
    bits_D: NDArray[np.float64],
    facts: Mapping[str, Any],
    **more: bool,
) -> dict[str, Any]:
    score = RecordedScore(
        subject=subject,
        snapshot_digest=spec.snapshot_digest,
        held_out_bytes=spec.settings.held_out_bytes,
        scorer=spec.scorer,
        bits=tuple(bits_D.tolist()),
        facts=dict(facts),
        run_id=spec.run_id,
        **more,
    )
    return score.model_dump(mode="json")


def compare(
    models: Mapping[str, Path],
    snapshot_url: str,
    store: ObjectStore,
    cache_dir: Path,
    settings: EvaluationSettings,
    allowed: AllowedCode | None = None,
) -> EvaluationReport:
    """Return every model's score on the held-out split of the snapshot at ``snapshot_url``, beside
    the simple baselines, in this process: nothing is recorded, or compared with training data."""
    snapshot = load_snapshot(snapshot_url, store)
    tokenizer = tokenizer_of(snapshot, store)
    held_out, _, _ = read_held_out(snapshot, tokenizer, store, cache_dir, settings)
    report = score_models(
        models,
        held_out,
        lambda: _training_texts(snapshot, tokenizer, store, cache_dir),
        settings,
        snapshot_digest=snapshot.digest,
        on_progress=lambda _fraction, _message: None,
        tokenizer=tokenizer,
        allowed=allowed,
    )
    allowed = allowed or AllowedCode((), cache_dir / "code")
    return with_metrics(report, models, held_out, settings, allowed, tokenizer)


def _training_texts(
    snapshot: Snapshot, tokenizer: Tokenizer, store: ObjectStore, cache_dir: Path
) -> list[bytes]:
    found = documents(snapshot, "train", store, cache_dir, TRAIN_BYTES, text_of=tokenizer.text)
    return [each.text for each in found]


def _with_tasks(
    report: EvaluationReport,
    spec: EvaluationSpec,
    models: dict[str, Path],
    directory: Path,
    scratch: Path,
    allowed: AllowedCode,
) -> EvaluationReport:
    """Return ``report`` with the scores on the tasks in ``directory``, of every model that could be
    scored."""
    began = time.monotonic()
    of_tasks = spec.model_copy(update={"snapshot_digest": spec.tasks_scored})

    def on_scored(subject: str, figures: Figures) -> None:
        count = sum(len(each) for by_metric in figures.values() for each in by_metric.values())
        if spec.scorer and count <= MOST_RECORDED:
            _emit("score", _record(of_tasks, subject, np.zeros(0), figures))

    scored = score_tasks(
        directory,
        {name: models[name] for name in models if report.score(name)},
        spec.settings,
        scratch=scratch,
        on_progress=lambda fraction, message: _progress(0.9 + 0.08 * fraction, message),
        allowed=allowed,
        known={
            each.subject: cast("Figures", each.facts)
            for each in spec.known
            if each.snapshot_digest == spec.tasks_scored
        },
        on_scored=on_scored,
    )
    seconds = report.seconds + time.monotonic() - began
    return report.model_copy(
        update={
            "tasks": scored,
            "tasks_digest": spec.tasks_digest,
            "tasks_as_chat": spec.settings.tasks_as_chat,
            "seconds": seconds,
        }
    )


def _tasks_directory(spec: EvaluationSpec, store: ObjectStore, scratch: Path) -> Path:
    """Return a directory with the spec's tasks, downloaded and verified."""
    manifest = fetch_manifest(spec.tasks_url, store)
    if manifest.digest != spec.tasks_digest:
        raise CorruptData(
            "these are not the tasks that were asked for",
            got=manifest.digest,
            wanted=spec.tasks_digest,
            where=spec.tasks_url,
        )
    directory = download_model(spec.tasks_url, scratch / "tasks", store)
    verify_directory(directory, manifest)
    return directory


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


def _overlaps(
    spec: EvaluationSpec,
    snapshot: Snapshot,
    held_out: list[tuple[str, bytes]],
    answers: dict[str, bytes] | None,
    tasks: Rows,
    store: ObjectStore,
    cache_dir: Path,
) -> tuple[Overlap, ...]:
    """Return how many of ``held_out``, and of the rows of ``tasks``, are in each snapshot that the
    candidate was trained on: as recorded, or compared now and passed on to be recorded."""
    for known in spec.known:
        if (known.subject, known.snapshot_digest) == (TRAINING_DATA, spec.compared_digest):
            found = cast("list[object]", known.facts["overlaps"])
            return tuple(Overlap.model_validate(each) for each in found)
    template = snapshot_template(snapshot, store) if spec.trained_on else None
    overlaps = tuple(
        find_overlap(
            held_out,
            _snapshot(each.snapshot_url, each.snapshot_digest, store),
            store,
            cache_dir,
            quarantined=each.quarantined_shards,
            answers=answers,
            without_system=bytes if template is None else template.without_system,
            tasks=tasks,
            on_progress=lambda part: _progress(0.98, f"training data compared: {part:.0%}"),
        )
        for each in spec.trained_on
    )
    if spec.scorer and overlaps:
        of_these = spec.model_copy(update={"snapshot_digest": spec.compared_digest})
        facts = {"overlaps": [each.model_dump(mode="json") for each in overlaps]}
        _emit("score", _record(of_these, TRAINING_DATA, np.zeros(0), facts))
    return overlaps


def main() -> int:
    """Evaluate the spec on standard input; return the process's exit code."""
    try:
        spec = EvaluationSpec.model_validate_json(sys.stdin.buffer.read())
    except ValidationError as error:
        return _fail(InvalidInput("not an evaluation spec", got=str(error).splitlines()[0:3]))
    # Torch takes 1.4 s to import: beside what is read first.
    threading.Thread(target=import_module, args=("torch",), daemon=True).start()
    try:
        report = evaluate(spec)
    except PacelineError as error:
        return _fail(error)
    if report is not None:
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
    line = json.dumps({"event": event, "data": data}, allow_nan=False) + "\n"
    with _writing:
        sys.stdout.write(line)
        sys.stdout.flush()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to do, and taking torch down takes 0.7 s
