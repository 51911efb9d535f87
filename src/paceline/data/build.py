"""Making a snapshot: read a source once, tokenise, join features, split by key, cut into shards.

One sample at a time: nothing grows with the source but a scratch file, and a shard is uploaded and
forgotten as soon as it is full. Idempotent by content: shards are named by their digest, and the
record is written last, so that a snapshot is either whole or not there.
"""

from __future__ import annotations

import logging
from pathlib import Path
from tempfile import TemporaryDirectory

from paceline.data.building import Building, Skipped
from paceline.data.catalog import Catalog
from paceline.data.features import load_features
from paceline.data.snapshot import (
    SNAPSHOT_FILE,
    Snapshot,
    load_snapshot,
    snapshot_url,
    store_at,
)
from paceline.data.source import list_files, open_source, read_samples
from paceline.data.tokenizer import Tokenizer, open_tokenizer
from paceline.data.uploads import Uploads
from paceline.errors import InvalidInput
from paceline.objects import ObjectStore, join_url
from paceline.profile import DataSettings
from paceline.wire.base import canonical_json, digest_of

log = logging.getLogger(__name__)


def build_snapshot(
    source: str,
    url: str,
    settings: DataSettings,
    store: ObjectStore,
    *,
    work_dir: Path | None = None,
) -> Snapshot:
    """Return the snapshot of ``source`` (see ``source.open_source``) below the data URL ``url``
    (``s3://…`` or ``file:///…``), read as ``settings`` say.

    Nothing is uploaded twice. Raises SourceMissing, InvalidInput for a source without two usable
    samples, for two samples of one key, and for a sample without the features asked for.
    """
    opened = open_source(source, settings)
    tokenizer = _tokenizer(settings.tokenizer, store)
    if work_dir is not None:
        work_dir.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory(prefix="snapshot-", dir=work_dir) as directory,
        Catalog(Path(directory) / "catalog") as catalog,
        Uploads(url, store_at(url, store)) as uploads,
    ):
        scratch = Path(directory)
        unlisted = Skipped()
        for each in list_files(opened, catalog, store, settings.seed):
            unlisted.add(each)
        if settings.features:
            load_features(settings.features, settings.key_field, catalog, store, scratch)

        def one_pass(moved: str | None) -> Building:
            building = Building(
                settings, tokenizer, catalog, uploads, scratch, unlisted.copy(), moved=moved
            )
            building.take(read_samples(opened, catalog, store, settings, scratch))
            return building

        built = one_pass(None)
        if built.samples < 2:
            raise _too_little(built, opened.where, settings)
        _require_usable(built, unlisted.count, opened.where, settings)
        if built.moved_wanted is not None:  # few samples fell on one side: one of them moves
            uploads.finish()
            catalog.forget_seen()
            built = one_pass(built.moved_wanted)
        record = built.record(opened.name)
        digest = digest_of(record)
        where = snapshot_url(url, digest)
        if tokenizer.file is not None:
            name = f"{tokenizer.vocabulary.sha256}.json"
            uploads.put(join_url(url, "tokenizers", name), tokenizer.file)
        uploads.finish()
        uploads.put(join_url(where, SNAPSHOT_FILE), canonical_json(record))
    log.info(
        "snapshot built digest=%s samples=%d tokens=%d shards=%d uploaded=%d skipped=%d",
        digest[:12],
        record.documents,
        record.token_count or 0,
        len(record.shards),
        uploads.uploaded,
        record.skipped,
    )
    return load_snapshot(where, store)


def _tokenizer(name: str, store: ObjectStore) -> Tokenizer:
    return open_tokenizer(name, store.get_bytes(name) if name.startswith("s3://") else None)


def _require_usable(built: Building, other: int, where: str, settings: DataSettings) -> None:
    """Refuse a source most of whose samples are none of ours; ``other``: files that hold none.

    Of text each file is a sample, and a directory holds what it holds; samples without features are
    left out where that was asked for.
    """
    unusable = built.skipped.count - other
    asked_for = settings.features and settings.missing_features == "skip"
    if settings.format == "text" or asked_for:
        return
    if unusable > settings.max_bad_share * (unusable + built.samples):
        raise InvalidInput(
            "most samples of the source cannot be used",
            got=f"{unusable} of {unusable + built.samples}: {built.skipped.told}",
            wanted=f"at most {settings.max_bad_share:.0%}, data.max_bad_share",
            where=where,
            do="Mend the files, or name their fields: data.text_field, data.key_field.",
        )


def _too_little(built: Building, where: str, settings: DataSettings) -> InvalidInput:
    return InvalidInput(
        "too little text for a training and a held-out split"
        if settings.format == "text"
        else "too few samples for a training and a held-out split",
        got=f"{built.samples} usable sample(s), {built.skipped.count} skipped"
        + (f" ({built.skipped.told})" if built.skipped.count else ""),
        wanted=f"at least 2 different ones within {settings.max_bytes} bytes",
        where=where,
        do="Add samples, or raise data.max_bytes.",
    )
