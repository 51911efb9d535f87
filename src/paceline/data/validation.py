"""Validate a snapshot before training: Great Expectations over a table with one row a sample.

A corrupt shard is put in quarantine and reported (``needs_review``); validation continues with the
rest unless too much of the data is bad. Defines the checks; callers act on the result.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.expectations import own_expectations
from paceline.data.formats import MAX_SAMPLE_BYTES, Array, ShardSamples, length_of
from paceline.data.loading import ShardCache
from paceline.data.snapshot import Shard, Snapshot, assign_splits, in_held_out
from paceline.errors import CorruptData, DataRejected, PacelineError
from paceline.schemas import digest_of
from paceline.storage import ObjectStore
from paceline.units import humane

log = logging.getLogger(__name__)

MAX_QUARANTINED_SHARE = 0.25  # of the snapshot's bytes
EXAMPLES = 3


@dataclass(frozen=True)
class ValidationReport:
    """The checks and their results; plain data, ready for JSON."""

    snapshot_digest: str
    passed: bool
    needs_review: bool  # some shards are in quarantine: a person should look
    documents: int
    total_bytes: int
    checks: list[dict[str, Any]] = field(default_factory=list)  # name, passed, got, examples
    quarantined: list[dict[str, Any]] = field(default_factory=list)  # shard, split, bytes, reason
    columns: list[dict[str, Any]] = field(default_factory=list)  # kind, lengths, least, greatest…
    samples_left_out: int = 0  # above MAX_ROWS, whole shards are left out, evenly
    seconds: float = 0.0

    @property
    def failures(self) -> list[str]:
        return [f"{each['name']}: {each['got']}" for each in self.checks if not each["passed"]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def validate_snapshot(
    snapshot: Snapshot,
    store: ObjectStore,
    cache_dir: Path,
    *,
    expectations: str = "",
) -> ValidationReport:
    """Return the validation report on ``snapshot``; where it fails its checks, with
    ``passed=False`` (``require_valid`` raises on it).

    ``expectations``: YAML of one's own, as of ``own_expectations``.
    """
    started = time.monotonic()
    own = require_expectations(expectations, snapshot)
    with ShardCache(snapshot, store, cache_dir) as cache:
        table = read_table(snapshot, cache)
    quarantined = table.quarantined
    bad_bytes = sum(each["bytes"] for each in quarantined)
    bad_share = bad_bytes / sum(each.bytes for each in snapshot.shards)
    checks = [
        {
            "name": "share of bytes in quarantine",
            "passed": bad_share <= MAX_QUARANTINED_SHARE,
            "got": f"{bad_share:.1%}, at most {MAX_QUARANTINED_SHARE:.0%} wanted",
            "examples": [each["shard"] for each in quarantined[:EXAMPLES]],
        }
    ]
    if len(table):
        checks += _expectations(table, snapshot, own)
    passed = bool(len(table)) and all(each["passed"] for each in checks)
    report = ValidationReport(
        snapshot_digest=snapshot.digest,
        passed=passed,
        needs_review=bool(quarantined),
        documents=len(table),
        total_bytes=sum(table.columns["n_bytes"]),
        checks=checks,
        quarantined=quarantined,
        columns=[asdict(each) for each in table.figures.values()],
        samples_left_out=table.samples_left_out,
        seconds=round(time.monotonic() - started, 3),
    )
    log.info(
        "snapshot validated digest=%s passed=%s documents=%d quarantined=%d",
        snapshot.digest[:12],
        passed,
        len(table),
        len(quarantined),
    )
    return report


def require_valid(report: ValidationReport) -> ValidationReport:
    """Return ``report``; raises DataRejected naming every failed check."""
    if not report.passed:
        raise DataRejected(
            "data snapshot failed its validation",
            got="; ".join(report.failures) or "no readable document",
            where=f"snapshot {report.snapshot_digest[:16]}",
            do="Fix the source and build the snapshot again.",
        )
    return report


def validation_inputs(snapshot_digest: str, expectations: str) -> dict[str, str]:
    """Return what decides a validation, by digest: the snapshot, and the YAML of one's own."""
    own = {"expectations": digest_of(expectations)} if expectations else {}
    return {"snapshot": snapshot_digest} | own


def validation_url(records_url: str, inputs: Mapping[str, str]) -> str:
    """Return where the report (.json) and the page (.html) of the validation of ``inputs`` lie."""
    return f"{records_url}/validation/{digest_of(inputs)}"


def require_not_refused(
    snapshot_digest: str, expectations: str, records_url: str, store: ObjectStore
) -> None:
    """Raise DataRejected, naming the failed checks, where a validation has refused the snapshot.

    A refusal with shards in quarantine does not count: they may be stored again under the same
    digest. Nor does a drift, which depends on other snapshots, and a report that cannot be read.
    """
    url = validation_url(records_url, validation_inputs(snapshot_digest, expectations))
    try:
        known = ValidationReport(**json.loads(store.get_bytes(f"{url}.json")))
    except (PacelineError, ValueError, TypeError):  # none yet, or of another version
        return
    if not known.passed and not known.quarantined:
        raise DataRejected(
            "this data snapshot has failed its validation",
            got="; ".join(known.failures),
            wanted="a snapshot that passes",
            where=f"{url}.html",
            do="Fix the source and build the snapshot again.",
        )


def require_expectations(text: str, snapshot: Snapshot) -> dict[str, Any]:
    """Return the expectations of one's own on ``snapshot``; raises as ``own_expectations``."""
    if not text.strip():
        return {}
    _import_great_expectations()
    features = [f"{FEATURE}{each.name}" for each in snapshot.columns if not each.shape]
    return own_expectations(text, snapshot, [*COLUMNS, *MADE_COLUMNS, *features])


def _import_great_expectations() -> Any:
    os.environ["GX_ANALYTICS_ENABLED"] = "false"  # read at import; disables telemetry
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports a module that Python 3.11 deprecates
        import great_expectations as gx
        import great_expectations.expectations
    return gx


def _expectations(table: Table, snapshot: Snapshot, own: dict[str, Any]) -> list[dict[str, Any]]:
    import pandas as pd

    gx = _import_great_expectations()
    gxe = gx.expectations

    record = snapshot.record
    low, high = _share_bounds(record.held_out_share, len(table))
    known = ["train", "held-out"]
    between, in_set = gxe.ExpectColumnValuesToBeBetween, gxe.ExpectColumnValuesToBeInSet
    equal, unique = gxe.ExpectColumnPairValuesToBeEqual, gxe.ExpectColumnValuesToBeUnique
    wanted: dict[str, Any] = {
        "key is present": gxe.ExpectColumnValueLengthsToBeBetween(column="key", min_value=1),
        "key is unique": unique(column="key"),
        "sample size is in range": between(
            column="n_bytes", min_value=1, max_value=MAX_SAMPLE_BYTES
        ),
        "no sample is empty": between(column="length", min_value=1),
        "lengths are those of the index": equal(column_A="length", column_B="length_in_file"),
        "text is UTF-8": in_set(column="is_text", value_set=[True]),
        "every number is finite": in_set(column="is_finite", value_set=[True]),
        "split is known": in_set(column="split", value_set=known),
        "split is the one its key draws": equal(column_A="split", column_B="split_of_key"),
        "no sample is in both splits or twice in one": unique(column="content"),
        "both splits are there": gxe.ExpectColumnDistinctValuesToContainSet(
            column="split", value_set=known
        ),
        "held-out share is as asked": gxe.ExpectColumnMeanToBeBetween(
            column="held_out", min_value=low, max_value=high
        ),
        "purpose is the snapshot's": in_set(column="purpose", value_set=[snapshot.purpose]),
    }
    if not table.is_partial:
        rows = gxe.ExpectTableRowCountToEqual(value=record.documents)
        wanted["all samples are there"] = rows
    wanted |= own
    for name, expectation in wanted.items():
        expectation.meta = {"check": name}
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False, "metric_calculations": False}
    asset = context.data_sources.add_pandas("snapshot").add_dataframe_asset("documents")
    batch = asset.add_batch_definition_whole_dataframe("all")
    suite = gx.ExpectationSuite(name="snapshot", expectations=[*wanted.values()])
    definition = gx.ValidationDefinition(
        name="snapshot", data=batch, suite=context.suites.add(suite)
    )
    context.validation_definitions.add(definition)
    result = definition.run(batch_parameters={"dataframe": pd.DataFrame(table.columns)})
    found = {each.expectation_config.meta["check"]: each for each in result.results}
    checks = []
    for name in wanted:
        details = dict(found[name].result or {})
        examples = (details.get("partial_unexpected_list") or [])[:EXAMPLES]
        checks.append(
            {
                "name": name,
                "passed": bool(found[name].success),
                "got": _got(details, found[name].exception_info),
                "examples": [str(value) for value in examples],
            }
        )
    return checks


def _share_bounds(share: float, documents: int) -> tuple[float, float]:
    """Return the bounds of the held-out share: five standard deviations plus one sample."""
    spread = 5 * (share * (1 - share) / documents) ** 0.5 + 1 / documents
    return max(0.0, share - spread), min(1.0, share + spread)


def _got(details: dict[str, Any], exception: Any) -> str:
    if "unexpected_count" in details:
        return f"{details['unexpected_count']} of {details.get('element_count')} rows differ"
    if "observed_value" in details:
        return f"observed {humane('', details['observed_value'])}"
    return f"could not be checked: {exception}"[:300]


def drift_of(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> dict[str, float]:
    """Return how far each column's statistics moved since an earlier snapshot of the same data.

    The larger of the mean's change, as a share of the earlier range, and the mean length's, as a
    share of the earlier one. A column that came or went, or has another kind, moved by 1.
    """
    old, new = ({each["column"]: each for each in columns} for columns in (before, now))
    return {name: _moved(old.get(name), new.get(name)) for name in sorted({*old, *new})}


def _moved(old: dict[str, Any] | None, new: dict[str, Any] | None) -> float:
    if old is None or new is None or old["kind"] != new["kind"]:
        return 1.0
    if (old["mean"] is None) != (new["mean"] is None):
        return 1.0
    length = abs(new["mean_length"] - old["mean_length"]) / max(old["mean_length"], 1.0)
    if old["mean"] is None:
        return float(length)
    span = old["greatest"] - old["least"] or abs(old["mean"]) or 1.0
    return float(max(abs(new["mean"] - old["mean"]) / span, length))


# A snapshot as a table: one row a sample, with only the values that the checks need.
#
# Stored by column, so that a row costs about a hundred bytes; of a snapshot with more samples than
# ``MAX_ROWS``, whole shards are left out, evenly, and the table records how many samples.

MAX_ROWS = 500_000
COLUMNS = (
    *("key", "content", "split", "purpose", "length", "length_in_file", "n_tokens", "n_bytes"),
    *("is_text", "is_finite"),
)
MADE_COLUMNS = ("split_of_key", "held_out")
FEATURE = "feature."  # before the name of a feature with one number a sample


@dataclass
class ColumnStatistics:
    """Statistics of a column's numbers over all samples read."""

    column: str
    kind: str
    samples: int = 0
    mean_length: float = 0.0
    shortest: int = 0
    longest: int = 0
    least: float | None = None  # None without finite numbers
    greatest: float | None = None
    mean: float | None = None
    not_finite: int = 0

    def __post_init__(self) -> None:
        self._total, self._count = 0.0, 0

    def add(self, array: Array) -> None:
        length = len(array) if array.ndim else 1
        self.shortest = length if not self.samples else min(self.shortest, length)
        self.longest = max(self.longest, length)
        self.samples += 1
        self.mean_length += (length - self.mean_length) / self.samples
        finite = np.asarray(array).reshape(-1)
        if finite.dtype.kind == "f":
            finite = finite[np.isfinite(finite)].astype(np.float64)
            self.not_finite += array.size - finite.size
        if finite.size:
            least, greatest = float(finite.min()), float(finite.max())
            self.least = least if self.least is None else min(self.least, least)
            self.greatest = greatest if self.greatest is None else max(self.greatest, greatest)
            self._total += float(finite.sum(dtype=np.float64))
            self._count += int(finite.size)
            self.mean = self._total / self._count if np.isfinite(self._total) else None


@dataclass
class Table:
    """The rows by column, the shards in quarantine, and the statistics of each column."""

    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    quarantined: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, ColumnStatistics] = field(default_factory=dict)
    samples_left_out: int = 0  # above ``max_rows``

    def __len__(self) -> int:
        return len(self.columns["key"])

    @property
    def is_partial(self) -> bool:
        """Return whether samples are missing from the table."""
        return bool(self.quarantined or self.samples_left_out)


def read_table(snapshot: Snapshot, cache: ShardCache, max_rows: int = MAX_ROWS) -> Table:
    """Return the table of ``snapshot``; a corrupt shard is listed as quarantined and does not
    raise."""
    table = Table()
    table.figures["tokens"] = ColumnStatistics("tokens", snapshot.vocabulary.kind)
    for column in snapshot.columns:
        axes = "".join(f"[{'any' if each is None else each}]" for each in column.shape)
        table.figures[column.name] = ColumnStatistics(column.name, f"{column.dtype}{axes}")
        if not column.shape:
            table.columns[f"{FEATURE}{column.name}"] = []
    shards = snapshot.shards
    step = -(-snapshot.record.documents // max_rows)
    looked_at = [each for number, each in enumerate(shards) if number % step == 0]
    if {each.split for each in looked_at} != {each.split for each in shards}:
        looked_at.append(shards[-1])  # the last shard is of the second split
    table.samples_left_out = snapshot.record.documents - sum(each.samples for each in looked_at)
    for shard, samples in cache.opened(looked_at):
        if isinstance(samples, CorruptData):
            table.quarantined.append(
                {
                    "shard": shard.sha256,
                    "split": shard.split,
                    "bytes": shard.bytes,
                    "documents": shard.samples,
                    "reason": str(samples.got),
                }
            )
        else:
            _add(table, snapshot, shard, samples, cache.lengths(shard))
    _draw_splits(table, snapshot)
    return table


def _add(
    table: Table, snapshot: Snapshot, shard: Shard, samples: ShardSamples, lengths: Array
) -> None:
    has_text = snapshot.vocabulary.kind == "bytes" and shard.text_bytes > 0
    rows = []
    for i in range(len(samples)):
        tokens, features = samples.tokens(i), samples.features(i)
        table.figures["tokens"].add(tokens)
        digest = hashlib.sha256(tokens.tobytes())
        n_bytes, finite = tokens.nbytes, True
        for name in sorted(features):
            array = features[name]
            digest.update(f"\0{name}\0{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
            n_bytes += array.nbytes
            table.figures[name].add(array)
            if array.dtype.kind == "f":
                finite = finite and bool(np.isfinite(array).all())
        rows.append(
            {
                "key": samples.key(i),
                "content": digest.hexdigest(),
                "split": shard.split,
                "purpose": snapshot.purpose,
                "length": length_of(tokens, features),
                "length_in_file": int(lengths[i]) if i < len(lengths) else -1,
                "n_tokens": len(tokens),
                "n_bytes": n_bytes,
                "is_text": not has_text or _is_text(samples.text_bytes(i)),
                "is_finite": finite,
                **{f"{FEATURE}{k}": v.item() for k, v in features.items() if not v.ndim},
            }
        )
    for name, values in table.columns.items():  # at once: a shard that fails leaves no rows
        values += [each[name] for each in rows]


def _is_text(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in text


def _draw_splits(table: Table, snapshot: Snapshot) -> None:
    """Add the split that each key draws.

    ``build_snapshot`` moves one of few samples to fill an empty split; which one can be computed
    only from all keys.
    """
    record, keys = snapshot.record, table.columns["key"]
    share, seed = record.held_out_share, record.seed
    if table.is_partial or not keys:
        held_out = {each for each in keys if in_held_out(each, share, seed)}
    else:
        held_out = assign_splits(sorted(set(keys)), share, seed)
    table.columns["split_of_key"] = ["held-out" if each in held_out else "train" for each in keys]
    table.columns["held_out"] = [float(each == "held-out") for each in table.columns["split"]]
