"""What a snapshot is: a record of shards, counts and labels, named by the digest of itself.

Layout below the data URL: ``shards/<sha256>.jsonl`` (shared by all snapshots) and
``snapshots/<digest>/snapshot.json``. Nothing here is ever overwritten with other content. Knows how
a snapshot is read, not how it is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, ValidationError

from paceline.errors import CorruptData, InvalidSnapshot, SourceMissing
from paceline.objects import ObjectStore, join_url
from paceline.wire.base import Name, Record, Sha256, canonical_json, digest_of

SNAPSHOT_FILE = "snapshot.json"
MAX_SNAPSHOT_BYTES = 64 * 1024 * 1024

Split = Literal["train", "held-out"]


class Shard(Record):
    """One JSONL file of documents, all of one split, named by its content."""

    split: Split
    sha256: Sha256
    bytes: int = Field(ge=1)  # of the file
    documents: int = Field(ge=1)
    text_bytes: int = Field(ge=1)  # of the documents' text, UTF-8

    @property
    def name(self) -> str:
        """Return the shard's file name."""
        return f"{self.sha256}.jsonl"

    @property
    def stream_bytes(self) -> int:
        """Return its token stream's length: a separator before each document and at the end."""
        return self.text_bytes + self.documents + 1


class SnapshotRecord(Record):
    """What ``snapshot.json`` holds; its canonical JSON's SHA-256 is the snapshot's digest."""

    schema_version: Literal[1] = 1
    purpose: Name
    project: Name
    source: str = Field(max_length=200)
    seed: int
    held_out_share: float = Field(gt=0, lt=1)
    shards: tuple[Shard, ...] = Field(min_length=2, max_length=1_000_000)
    documents: int = Field(ge=2)
    total_bytes: int = Field(ge=2)  # of text
    duplicates: int = Field(default=0, ge=0)  # files left out because another has the same text
    skipped: int = Field(default=0, ge=0)  # files left out because they are no acceptable text
    skipped_examples: tuple[str, ...] = Field(default=(), max_length=100)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A snapshot and where it is; ``url`` is what ``load_snapshot`` takes."""

    url: str
    digest: str
    record: SnapshotRecord

    @property
    def purpose(self) -> str:
        """Return what this data may be used for."""
        return self.record.purpose

    @property
    def project(self) -> str:
        """Return which project this data belongs to."""
        return self.record.project

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Return all shards, of both splits."""
        return self.record.shards

    def of_split(self, split: Split) -> tuple[Shard, ...]:
        """Return the shards of one split, in order."""
        return tuple(each for each in self.record.shards if each.split == split)

    def shard_url(self, shard: Shard) -> str:
        """Return where the shard's bytes are."""
        return join_url(root_url(self.url), "shards", shard.name)


def snapshot_url(url: str, digest: str) -> str:
    """Return where the snapshot called ``digest`` lives below the data URL."""
    return join_url(url, "snapshots", digest)


def root_url(url: str) -> str:
    """Return the data URL of the snapshot at ``url``."""
    root, middle, _ = url.rstrip("/").rsplit("/", 2)
    if middle != "snapshots":
        raise InvalidSnapshot(
            "not a snapshot's URL", got=url, wanted="s3://bucket/prefix/snapshots/DIGEST"
        )
    return root


def load_snapshot(url: str, store: ObjectStore) -> Snapshot:
    """Return the snapshot at ``url``, checked against the digest in its own name.

    Raises InvalidSnapshot for a malformed record, CorruptData for one that its name does not fit.
    """
    root_url(url)
    where = join_url(url, SNAPSHOT_FILE)
    try:
        raw = store.get_bytes(where, max_bytes=MAX_SNAPSHOT_BYTES)
    except SourceMissing as error:
        raise SourceMissing(
            "no snapshot here", where=where, do="Build it with `paceline snapshot`."
        ) from error
    try:
        record = SnapshotRecord.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidSnapshot(
            "snapshot is malformed",
            got=f"{'.'.join(str(part) for part in first['loc']) or 'file'}: {first['msg']}",
            where=where,
        ) from error
    digest = digest_of(record)
    if digest != url.rstrip("/").rsplit("/", 1)[1] or raw != canonical_json(record):
        raise CorruptData("snapshot does not match its name", got=digest, where=where)
    _check_sums(record, where)
    return Snapshot(url=url.rstrip("/"), digest=digest, record=record)


def require_purpose(snapshot: Snapshot, purpose: str, project: str | None = None) -> None:
    """Raise InvalidSnapshot unless ``snapshot`` is labelled for ``purpose`` (and ``project``)."""
    if snapshot.purpose != purpose:
        raise InvalidSnapshot(
            "snapshot is labelled for another purpose",
            got=repr(snapshot.purpose),
            wanted=repr(purpose),
            where=snapshot.url,
            do="Use a snapshot of that purpose, or build one whose owner agreed to it.",
        )
    if project is not None and snapshot.project != project:
        raise InvalidSnapshot(
            "snapshot belongs to another project",
            got=repr(snapshot.project),
            wanted=repr(project),
            where=snapshot.url,
        )


def _check_sums(record: SnapshotRecord, where: str) -> None:
    shards = record.shards
    problems = [
        (sum(each.documents for each in shards) != record.documents, "documents do not add up"),
        (sum(each.text_bytes for each in shards) != record.total_bytes, "bytes do not add up"),
        (len({each.sha256 for each in shards}) != len(shards), "a shard is listed twice"),
        ({each.split for each in shards} != {"train", "held-out"}, "a split is empty"),
    ]
    for wrong, what in problems:
        if wrong:
            raise InvalidSnapshot("snapshot contradicts itself", got=what, where=where)
