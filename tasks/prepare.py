"""What a lifecycle starts from: a data snapshot in the object store, and a base model of its own
where none is given."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.config import DataSettings
from paceline.data import (
    STDLIB,
    Snapshot,
    ValidationReport,
    build_snapshot,
    drift_of,
    expectations_text,
    load_snapshot,
    require_expectations,
    require_valid,
    template_files,
    validate_snapshot,
    validation_inputs,
    validation_page,
    validation_url,
)
from paceline.errors import DataRejected, InvalidInput, PacelineError
from paceline.jobs import require_permitted
from paceline.models import TOKENIZER_FILE
from paceline.schemas import StageRecord, canonical_json, digest_of
from paceline.storage import ObjectStore
from paceline.tasks._support import artifacts, sealed_records
from paceline.tasks._support.lineage import log_page
from paceline.tasks._support.run import Run, StageResult
from paceline.tasks._support.stages import stage
from paceline.tasks.publish import is_published, publish_base
from paceline.training.parallel import cuts_of

STATISTICS = "data-statistics"  # in the ledger: of the last snapshot of a source
CHECKED_LATER = {"expectations", "max_drift"}  # they decide nothing of what is in a snapshot
# With the source, they decide which text a snapshot holds out: of two releases of one source with
# the same of these, one may judge what the other judged before.
EXAM = {
    "format", "text_field", "key_field", "slice_field", "slice_fields", "features",
    "missing_features", "max_tokens", "max_bytes", "held_out_share", "seed", "purpose", "project",
}  # fmt: skip
NOTED_DRIFT = 0.1  # of a column
READER = 2  # another number: what was read of the same source before is read again
MOST_COMPARED = 60  # columns: a record of the ledger is at most 64 KiB
MOST_RECORDED = 50  # shards in quarantine, of the same record
MAX_PAGE_BYTES = 16 * 1024 * 1024
VALIDATION_PAGE = "data-validation.html"  # in MLflow
SKIPPED_NAMED = 5  # samples left out, in the summary; the record lists a hundred


@stage("build-data-snapshot", retries=2)
def build_data_snapshot(
    run: Run, source: str | None = None, reading: dict[str, Any] | None = None
) -> StageResult:
    """Tokenise, shard and digest the samples at ``source`` (default: the profile's) into a snapshot
    in S3; ``reading`` changes the profile's data settings (format, text_field, features, …).

    Raises InvalidInput for a setting that is unknown or out of range.
    """
    own_data = run.runtime.profile.data
    settings = data_settings(own_data, reading)
    source = source or settings.source

    def work() -> dict[str, Any]:
        with artifacts.Progress("snapshot", f"samples of {source}") as page:

            def moved(share: float, samples: int, size: int) -> None:
                said = f"{samples:,} samples, {size / 1e6:,.1f} MB"
                run.report("snapshot", share, said)
                page.show(share, said)

            snapshot = build_snapshot(
                source,
                run.runtime.data_url,
                settings,
                run.store,
                work_dir=run.work_dir,
                on_progress=moved,
            )
        return _reference(snapshot)

    result = run.stage(
        "snapshot",
        {
            "source": source,
            "reader": READER,
            "settings": settings.model_dump(mode="json", exclude=CHECKED_LATER),
            "fingerprint": fingerprint(source, settings, run.store),
        },
        work,
        still_true=lambda output: run.store.exists(f"{output['url']}/snapshot.json"),
        describe=lambda o: (
            f"{o['documents']} samples, {o['tokens']:,} tokens, {o['bytes'] / 1e6:.1f} MB of text"
            + (f", {o['skipped']} left out" if o["skipped"] else "")
            + (f", cut at data.max_bytes = {o['cut_at_bytes']:,}" if o["cut_at_bytes"] else "")
        ),
    )
    if run.runtime.secrets.records_key:  # not on a node, whose word would not count
        built = load_snapshot(str(result.output["url"]), run.store)
        exam = exam_of(source, settings, built)
        # A copy of a source has the same snapshot: the first one counts, or the operator's own.
        own = exam == exam_of(own_data.source, own_data, built)
        sealed_records.add_reference(run, "exam", built.digest, exam, replaces=own)
    if result.output["skipped"] and source != STDLIB:
        named = "; ".join(result.output.get("skipped_examples", ()))  # an older ledger has none
        run.warn(f"{result.output['skipped']} samples are left out of the snapshot: {named}")
    if (same := result.output.get("duplicates", 0)) and source != STDLIB:
        run.warn(f"{same} samples that say the same as another are left out of the snapshot")
    return result


def exam_of(source: str, settings: DataSettings, built: Snapshot) -> str:
    """Return what ``built`` shares with each release of ``source`` that holds out the same."""
    asked = digest_of([source.rstrip("/"), settings.model_dump(mode="json", include=EXAM)])
    # A template renders what is judged, and a tokenizer may leave samples out.
    reads: tuple[str | None, ...] = ()
    if built.is_masked or built.record.skipped:
        reads = built.record.template_sha256, built.record.vocabulary.sha256
    return digest_of([asked, *reads])


@stage("validate-data", retries=2)
def validate_data(run: Run, snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return ``snapshot`` once it passes the Great Expectations suite; refuse it where it fails.

    Its page is stored, and shown with the run in MLflow and Prefect, where it is refused, too.
    Raises DataRejected naming the failed expectations.
    """

    expectations = expectations_text(run.runtime.profile.data.expectations, run.store)
    inputs = validation_inputs(snapshot["digest"], expectations)

    def work() -> dict[str, Any]:
        loaded = load_snapshot(snapshot["url"], run.store)
        report = validate_snapshot(
            loaded, run.store, run.work_dir / "cache", expectations=expectations
        )
        artifacts.table("data validation", report.checks, "Great Expectations on the snapshot")
        artifacts.table("data columns", report.columns, "What the snapshot's samples hold")
        if report.quarantined:
            artifacts.table("data quarantine", report.quarantined, "Shards that are passed over")
        drift: dict[str, float] = {}
        try:
            require_valid(report)
            drift = _compare(run, loaded, report.columns)
        except DataRejected as error:
            try:
                _show(run, _keep(run, inputs, loaded, report, drift, error.one_line())[1])
            except PacelineError as also:  # what was refused is what people must read
                run.warn(f"the page of the validation is not shown: {also}")
            raise
        record, page = _keep(run, inputs, loaded, report, drift)
        if report.needs_review:
            reasons = sorted({each["reason"] for each in report.quarantined})
            run.warn(
                f"{len(report.quarantined)} data shards are in quarantine: needs review "
                f"({'; '.join(reasons)[:200]})"
            )
        return {
            "documents": report.documents,
            "checks": len(report.checks),
            "quarantined_count": len(report.quarantined),
            "quarantined": report.quarantined[:MOST_RECORDED],  # all are in the report
            "needs_review": report.needs_review,
            "columns": report.columns[:MOST_COMPARED],
            "drift": drift,
            "report": record,
            "page": page,
        }

    done = run.stage(
        "validate-data",
        inputs,
        work,
        still_true=lambda o: not o.get("page") or run.store.exists(o["page"]),
        describe=lambda o: (
            f"{o['checks']} expectations on {o['documents']} samples, "
            f"{o.get('quarantined_count', len(o['quarantined']))} shards quarantined"
        ),
    )
    if page := done.output.get("page"):  # an older ledger has none
        _show(run, page)
    return snapshot


def _keep(
    run: Run,
    inputs: Mapping[str, str],
    snapshot: Snapshot,
    report: ValidationReport,
    drift: Mapping[str, float],
    refused: str = "",
) -> tuple[str, str]:
    """Store the report and its page in the installation's bucket; return their URLs."""
    url = validation_url(run.runtime.records_url, inputs)
    page = validation_page(snapshot, report, drift, refused)
    run.store.put_bytes(f"{url}.json", canonical_json(report.to_dict()))
    run.store.put_bytes(f"{url}.html", page.encode())
    return f"{url}.json", f"{url}.html"


def _show(run: Run, page: str) -> None:
    """Link the validation's page with the run in MLflow, in Prefect, and with its job."""
    text = run.store.get_bytes(page, MAX_PAGE_BYTES).decode()
    shown = log_page(run, "data", text, VALIDATION_PAGE)
    artifacts.link("data docs", shown, "Checks, columns and drift of the data snapshot")


def require_own_expectations(run: Run, url: str) -> None:
    """Raise InvalidInput where ``data.expectations`` cannot be checked on the snapshot at ``url``;
    reads none of its samples."""
    if text := expectations_text(run.runtime.profile.data.expectations, run.store):
        require_expectations(text, load_snapshot(url, run.store))


def _compare(run: Run, snapshot: Snapshot, columns: list[dict[str, Any]]) -> dict[str, float]:
    """Return how far each column moved since the last valid snapshot of the same source, and keep
    this one's statistics for the next. Raises DataRejected above ``data.max_drift``."""
    columns, made = columns[:MOST_COMPARED], snapshot.record
    key = digest_of([made.source, made.project, made.purpose, made.format])
    known = run.retry(lambda: run.coordinator.ledger_get(STATISTICS, key))
    last: dict[str, Any] | None = None if known is None else dict(known.output)
    if last is not None and last["snapshot"] == snapshot.digest:  # validated anew
        last = last["before"]
    drift: dict[str, float] = {}
    if last is not None:
        drift = {name: round(by, 4) for name, by in drift_of(last["columns"], columns).items()}
        _judge(run, drift, str(last["snapshot"]), snapshot)
    kept = last and {name: last[name] for name in ("snapshot", "columns")}
    output: dict[str, Any] = {"snapshot": snapshot.digest, "columns": columns, "before": kept}
    record = StageRecord.of(STATISTICS, key, output, run.run_id)
    run.retry(lambda: run.coordinator.ledger_put(record))
    return drift


def _judge(run: Run, drift: dict[str, float], before: str, snapshot: Snapshot) -> None:
    """Note columns that moved, or raise DataRejected where one moved above the profile's limit."""
    limit = run.runtime.profile.data.max_drift
    said = ", ".join(
        f"{name} by {by:.0%}" for name, by in drift.items() if by > (limit or NOTED_DRIFT)
    )
    if said and limit:
        raise DataRejected(
            "the data moved too far since the last snapshot of this source",
            got=said,
            wanted=f"at most {limit:.0%} (data.max_drift)",
            where=f"snapshot {snapshot.digest[:16]}, after {before[:16]}",
            do="Look at the data; if they are right, raise data.max_drift.",
        )
    if said:
        run.warn(f"data moved since snapshot {before[:12]}: {said}")


@stage("publish-base-model")
def publish_base_model(run: Run, snapshot: dict[str, Any]) -> StageResult:
    """Publish a new, untrained model for ``snapshot`` as version 1: the base of a lifecycle.

    The version's URL carries the digest of what it was made from, so that another base (another
    size, other data) is another prefix and never a conflict.
    """
    profile = run.runtime.profile
    inputs = {
        "model": profile.model.model_dump(mode="json"),
        "snapshot": snapshot["digest"],
        "cuts": cuts_of(profile.training.mesh),
    }
    model_id = f"{profile.model.model_id}-{digest_of(inputs)[:8]}"

    def work() -> dict[str, Any]:
        data = load_snapshot(snapshot["url"], run.store)
        with tempfile.TemporaryDirectory(prefix="base-", dir=run.work_dir) as made:
            from paceline.training import write_new_model  # imports torch

            write_new_model(profile, data, Path(made))
            return publish_base(run, Path(made), model_id)

    return run.stage(
        "base",
        inputs,
        work,
        still_true=lambda o: is_published(run, o),
        describe=lambda o: f"{o['model_id']} v{o['version']}, {o['parameters']:,} parameters",
    )


def reading_for(run: Run, base: dict[str, Any]) -> dict[str, str] | None:
    """Return the data setting with which a snapshot has the tokens of the model ``base``, and its
    chat template: its own tokenizer, where it has one and the profile names none."""
    files = {each.path for each in run.manifest(base["url"]).files}
    if run.runtime.profile.data.tokenizer != "bytes" or TOKENIZER_FILE not in files:
        return None
    return {"tokenizer": f"{base['url']}/{TOKENIZER_FILE}"}


def snapshot_reference(run: Run, url: str) -> dict[str, Any]:
    """Return what stages need to know of the snapshot at ``url``: its url, digest and sizes."""
    return _reference(load_snapshot(url, run.store))


def permitted_snapshot(
    run: Run, url: str, purpose: str = "", users: Collection[tuple[str, str]] = (("default", ""),)
) -> dict[str, Any]:
    """Return ``snapshot_reference`` of the snapshot at ``url`` where one of ``users`` (team,
    project) may use it for ``purpose`` ("": the profile's), by the coordinator's table of purposes.

    Raises AccessDenied, or InvalidSnapshot for another label or project where there is no table.
    """
    data, snapshot = run.runtime.profile.data, load_snapshot(url, run.store)
    require_permitted(
        run.retry(run.coordinator.data_purposes),
        snapshot,
        purpose or data.purpose,
        users,
        own_project=data.project,
        now=time.time(),
    )
    return _reference(snapshot)


def data_settings(settings: DataSettings, changes: dict[str, Any] | None) -> DataSettings:
    """Return ``settings`` with ``changes``; raises InvalidInput naming the one that cannot be."""
    try:
        return DataSettings.model_validate(settings.model_dump() | (changes or {}))
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidInput(
            "data setting is not acceptable",
            got=f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}",
            wanted=f"one of {', '.join(sorted(DataSettings.model_fields))}",
        ) from error


def fingerprint(source: str, settings: DataSettings, store: ObjectStore) -> str:
    """Return what tells cheaply whether ``source``, or a file its samples are read with, has
    changed since: names, sizes and times, or ETags.

    The snapshot itself is named by its content; this only decides whether to read it all again.
    """
    beside = [*settings.features]
    if settings.tokenizer != "bytes":
        beside += [settings.tokenizer, *template_files(settings.tokenizer)]
    return digest_of([_state(each, store) for each in (source, *beside)])


def _state(source: str, store: ObjectStore) -> list[Any]:
    if source == "stdlib":
        return [sys.version, sys.prefix]
    if source.startswith("s3://"):
        found = store.list(source) or ([store.head(source)] if store.exists(source) else [])
        return [[each.url, each.size, each.etag] for each in found]
    root = Path(source)
    files = [root] if root.is_file() else sorted(each for each in root.rglob("*") if each.is_file())
    stats = [(str(each.relative_to(root)), each.stat()) for each in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _reference(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "url": snapshot.url,
        "digest": snapshot.digest,
        "documents": snapshot.record.documents,
        "bytes": snapshot.record.total_bytes,
        "tokens": snapshot.tokens,
        "format": snapshot.record.format,
        "label": snapshot.purpose,
        "project": snapshot.project,
        "skipped": snapshot.record.skipped,
        "skipped_examples": list(snapshot.record.skipped_examples[:SKIPPED_NAMED]),
        "duplicates": snapshot.record.duplicates,
        "cut_at_bytes": snapshot.record.cut_at_bytes,
    }
