"""Snapshot: a record of shards, counts and labels, named by its own digest.

Layout below the data URL: ``shards/<sha256>.safetensors`` with ``shards/<sha256>.lengths`` beside
it (shared by all snapshots), ``tokenizers/<sha256>.json`` and ``snapshots/<digest>/snapshot.json``.
No object is ever overwritten with other content. Also assigns samples to splits and checks that a
snapshot suits a job. Does not build snapshots.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from paceline.errors import CorruptData, InvalidInput, InvalidSnapshot, SourceMissing
from paceline.schemas import Name, Record, Sha256, canonical_json, digest_of
from paceline.storage import join_url
from paceline.text import printable

if TYPE_CHECKING:  # each process of a transform or a reader would import them
    from paceline.config import DataSettings
    from paceline.storage import ObjectStore

SNAPSHOT_FILE = "snapshot.json"
MAX_SNAPSHOT_BYTES = 256 * 1024 * 1024  # about a million shards

Split = Literal["train", "held-out"]


class Vocabulary(Record):
    """The meaning of a snapshot's tokens: bytes, or a tokenizer by its digest."""

    kind: Literal["bytes", "tokenizers"] = "bytes"
    sha256: Sha256 | None = None  # of the tokenizer.json; None for bytes
    vocab_size: int = Field(default=256, ge=2, le=2**31 - 1)
    separator: int = Field(default=0xFF, ge=0)  # between documents; not in UTF-8


BYTE_VOCABULARY = Vocabulary()


class Column(Record):
    """One array that every sample has beside its tokens: name, type, shape."""

    name: str = Field(min_length=1, max_length=128)
    dtype: str = Field(pattern=r"^(bool|u?int(8|16|32|64)|float(16|32|64))$")
    shape: tuple[int | None, ...] = Field(max_length=8)  # of a sample; None: varies, first axis


# A value for each token: whether it counts in the loss. Samples of a snapshot with this column are
# conversations: rows begin with their first token instead of a separator.
LOSS_MASK = "loss_mask"
MASK_COLUMN = Column(name=LOSS_MASK, dtype="bool", shape=(None,))
# A sample with it is a pair: a conversation with the chosen answer, and from this token on the same
# one with the rejected answer.
REJECTED_AT = "rejected_at"
REJECTED_COLUMN = Column(name=REJECTED_AT, dtype="int32", shape=())


class _Grown(Record):
    """Base of records with later fields: a field that is unset is not written.

    So a record of an older version keeps its bytes and its digest.
    """

    @model_serializer(mode="wrap")
    def _without_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {name: value for name, value in fields.items() if value is not None}


class Shard(_Grown):
    """One file of samples of one split, named by its content."""

    split: Split
    sha256: Sha256
    bytes: int = Field(ge=1)  # of the file
    documents: int = Field(ge=1)  # samples
    text_bytes: int = Field(ge=0)  # of the samples' text, UTF-8
    token_count: int = Field(ge=0)
    lengths_sha256: Sha256  # of the file of lengths beside it

    @property
    def name(self) -> str:
        return f"{self.sha256}.safetensors"

    @property
    def lengths_name(self) -> str:
        """Return the name of the file with its samples' lengths (int32, little endian)."""
        return f"{self.sha256}.lengths"

    @property
    def samples(self) -> int:
        return self.documents

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all samples, without separators."""
        return self.token_count

    @property
    def stream_bytes(self) -> int:
        """Return the length of the token stream, with a separator before each document and at the
        end."""
        return self.tokens + self.documents + 1


class SnapshotRecord(_Grown):
    """The content of ``snapshot.json``; the SHA-256 of its canonical JSON is the snapshot's
    digest."""

    schema_version: Literal[2] = 2
    purpose: Name
    project: Name
    source: str = Field(max_length=200)
    seed: int
    held_out_share: float = Field(gt=0, lt=1)
    shards: tuple[Shard, ...] = Field(min_length=2, max_length=1_000_000)
    documents: int = Field(ge=2)
    total_bytes: int = Field(ge=0)  # of text
    duplicates: int = Field(default=0, ge=0)  # left out: another sample has the same content
    skipped: int = Field(default=0, ge=0)  # left out: unusable
    skipped_examples: tuple[str, ...] = Field(default=(), max_length=100)
    format: Literal["text", "jsonl", "parquet", "tar"]
    vocabulary: Vocabulary
    columns: tuple[Column, ...] = Field(max_length=1000)
    token_count: int = Field(ge=0)
    cut_at_bytes: int | None = Field(default=None, ge=1)  # the budget, if it excluded samples
    # with a loss mask
    template_sha256: Sha256 | None = None  # of the chat template; None: samples came as tokens
    longest_tokens: int | None = Field(default=None, ge=1)  # of a sample


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A snapshot and its location; ``url`` is what ``load_snapshot`` takes."""

    url: str
    digest: str
    record: SnapshotRecord

    @property
    def purpose(self) -> str:
        return self.record.purpose

    @property
    def project(self) -> str:
        return self.record.project

    @property
    def vocabulary(self) -> Vocabulary:
        """Return the meaning of its tokens."""
        return self.record.vocabulary

    @property
    def columns(self) -> tuple[Column, ...]:
        """Return the features that each sample has."""
        return self.record.columns

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all samples, without separators."""
        return sum(each.tokens for each in self.record.shards)

    @property
    def in_words(self) -> str:
        """Return a line on it for a model's card, in Markdown: digest, source, counts, purpose."""
        from paceline.config import DataSettings

        record, learned = self.record, self.of_split("train")
        documents, tokens, text_bytes = (
            sum(getattr(each, name) for each in learned)
            for name in ("documents", "tokens", "text_bytes")
        )
        unnamed = DataSettings.model_fields["project"].default
        project = f", project `{record.project}`" * (record.project != unnamed)
        source = printable(record.source).replace("`", "'").replace("|", "/")
        return (
            f"snapshot `{self.digest}`: `{source}`, {documents:,} documents, {tokens:,} tokens, "
            f"{text_bytes:,} bytes of text to learn from; {record.documents - documents:,} "
            f"documents held out; purpose `{record.purpose}`{project}"
        )

    @property
    def is_masked(self) -> bool:
        """Return whether a loss mask tells which tokens count: its samples are conversations."""
        return MASK_COLUMN in self.columns

    @property
    def is_paired(self) -> bool:
        """Return whether its samples are pairs of answers, a chosen and a rejected one."""
        return REJECTED_COLUMN in self.columns

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Return all shards, of both splits."""
        return self.record.shards

    def of_split(self, split: Split) -> tuple[Shard, ...]:
        return tuple(each for each in self.record.shards if each.split == split)

    def shard_url(self, shard: Shard) -> str:
        return join_url(root_url(self.url), "shards", shard.name)

    @property
    def tokenizer_url(self) -> str | None:
        """Return the URL of its tokenizer.json; None where tokens are bytes."""
        digest = self.vocabulary.sha256
        return digest and join_url(root_url(self.url), "tokenizers", f"{digest}.json")

    @property
    def template_url(self) -> str | None:
        """Return the URL of the tokenizer_config.json of its conversations; None without them."""
        tokenizer, template = self.tokenizer_url, self.record.template_sha256
        return tokenizer and template and f"{tokenizer.removesuffix('.json')}-{template[:16]}.json"


def store_at(url: str, store: ObjectStore) -> ObjectStore:
    """Return the store for ``url``: ``store``, or the local disk for ``file:///…``."""
    from paceline.storage import DiskStore

    if url.startswith("file://") and not isinstance(store, DiskStore):
        return DiskStore()
    return store


def snapshot_url(url: str, digest: str) -> str:
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
    """Return the snapshot at ``url``, verified against the digest in its URL.

    Raises SourceMissing, InvalidSnapshot for a malformed record, CorruptData for a record that does
    not match the digest.
    """
    root_url(url)
    where = join_url(url, SNAPSHOT_FILE)
    try:
        raw = store_at(url, store).get_bytes(where, max_bytes=MAX_SNAPSHOT_BYTES)
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
            do="Build the snapshot again.",
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
    empty = [each.sha256[:12] for each in shards if not each.tokens and not record.columns]
    tokens = sum(each.tokens for each in shards)
    problems = [
        (sum(each.documents for each in shards) != record.documents, "documents do not add up"),
        (sum(each.text_bytes for each in shards) != record.total_bytes, "bytes do not add up"),
        (record.token_count != tokens, "tokens do not add up"),
        (len({each.sha256 for each in shards}) != len(shards), "a shard is listed twice"),
        ({each.split for each in shards} != {"train", "held-out"}, "a split is empty"),
        (bool(empty), f"shard {', '.join(empty[:3])} is empty"),
        (
            (MASK_COLUMN in record.columns) != (record.longest_tokens is not None),
            "a loss mask without the longest sample, or the reverse",
        ),
    ]
    for wrong, what in problems:
        if wrong:
            raise InvalidSnapshot("snapshot contradicts itself", got=what, where=where)


# Assignment of samples to splits: a pure function of a sample's key and the snapshot's seed.


def in_held_out(key: str, share: float, seed: int) -> bool:
    """Return whether a sample is in the held-out split: a function of its key and the seed."""
    return draw(key, seed) < share


def assign_splits(keys: Sequence[str], share: float, seed: int) -> set[str]:
    """Return the held-out keys; at least one key falls in each split."""
    held_out = {key for key in keys if in_held_out(key, share, seed)}
    by_draw = sorted(keys, key=lambda key: (draw(key, seed), key))
    if not held_out:
        held_out = {by_draw[0]}
    elif len(held_out) == len(keys):
        held_out.remove(by_draw[-1])
    return held_out


def draw(key: str, seed: int) -> float:
    """Return a pseudo-random number in [0, 1), a function of key and seed."""
    digest = hashlib.sha256(f"split:{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:8]) / 2**64


def require_columns(columns: int, global_batch: int) -> None:
    """Raise InvalidInput unless ``columns`` divide the global batch; 0 means chosen
    automatically."""
    if columns and global_batch % columns:
        raise InvalidInput(
            "columns do not divide the global batch",
            got=f"{columns} columns, {global_batch} sequences",
            wanted="a divisor",
            where="data.columns",
            do="Set data.columns to a divisor of training.batch_sequences, or to 0.",
        )


def require_batching(batching: str, columns: Sequence[str]) -> None:
    """Raise InvalidInput where samples with feature ``columns`` cannot be batched this way."""
    whole = ("bucketed",) if REJECTED_AT in columns else ("packed", "bucketed")
    if LOSS_MASK in columns and batching not in whole:
        raise InvalidInput(
            "conversations stay whole, and a pair has a row of its own",
            got=f"data.batching {batching}",
            wanted=" or ".join(whole),
            where="data.batching",
            do=f"Set data.batching={whole[0]}.",
        )
    if batching == "windows" and columns:
        raise InvalidInput(
            "windows have no features: they cross the edges of samples",
            got=f"samples with {', '.join(columns)}",
            wanted="data.batching packed, bucketed or carried",
            where="data.batching",
            do="Set data.batching=packed (fields of JSONL that are numbers are features), or leave "
            "those fields out.",
        )


# Checks from the record alone, before any rank starts, that ranks can read a snapshot.


def require_readable(
    snapshot: Snapshot,
    settings: DataSettings,
    *,
    context: int,
    global_batch: int,
    splits: Sequence[Split],
    pairs: bool = False,
) -> None:
    """Raise InvalidInput or InvalidSnapshot where ``settings`` do not fit the ``splits``.

    ``pairs``: whether ``training.dpo`` is set, and the samples must be pairs of answers.
    """
    if snapshot.is_paired != pairs:
        kind = "conversations" if snapshot.is_masked else "text, or other samples"
        raise InvalidInput(
            "training.dpo learns from pairs of answers, and nothing else does",
            got=f"training.dpo and {kind}" if pairs else "pairs without training.dpo",
            wanted="training.dpo.beta, and rows with prompt, chosen and rejected",
            where=snapshot.url,
        )
    require_columns(settings.columns, global_batch)
    require_batching(settings.batching, [each.name for each in snapshot.columns])
    require_token_features(settings.token_features, snapshot.columns)
    if context:
        require_whole(snapshot, context)
    largest = max(each.bytes for split in splits for each in snapshot.of_split(split))
    if largest > settings.cache_bytes:
        raise InvalidInput(
            "cache is smaller than one shard",
            got=f"{settings.cache_bytes} bytes",
            wanted=f"at least {largest} bytes, and room for a group of shards to be quick",
            where="data.cache_bytes",
            do="Raise data.cache_bytes, or build the snapshot with smaller data.shard_bytes.",
        )
    if settings.batching == "windows":
        for split in splits:
            require_windows([each.stream_bytes for each in snapshot.of_split(split)], context)


def require_whole(snapshot: Snapshot, context: int) -> None:
    """Raise InvalidInput where a conversation and the separator after it exceed a row."""
    longest = snapshot.record.longest_tokens
    if longest is not None and longest + 1 > context:
        raise InvalidInput(
            "a conversation is longer than a row",
            got=f"{longest} tokens",
            wanted=f"at most {context - 1}",
            where=snapshot.url,
            do=f"Set model.context to {longest + 1} or more, or build the snapshot with "
            f"--max-tokens {context - 1}, which leaves longer ones out.",
        )


def require_token_features(names: Collection[str], columns: Sequence[Column]) -> None:
    """Raise InvalidInput where ``names`` are not all among ``columns``."""
    known = sorted(each.name for each in columns)
    if not set(known).issuperset(names):
        raise InvalidInput(
            "token_features that the snapshot does not have",
            got=sorted(set(names) - set(known)),
            wanted=f"some of {known}",
            where="data.token_features",
            do="Correct data.token_features.",
        )
    if names and MASK_COLUMN in columns:
        raise InvalidInput(
            "conversations have no features a token",
            got=sorted(names),
            wanted="none beside their loss mask",
            where="data.token_features",
            do="Unset data.token_features.",
        )


def require_windows(stream_tokens: Sequence[int], context: int) -> None:
    """Raise InvalidSnapshot where no shard's stream is long enough for one window."""
    if max(stream_tokens, default=0) <= context:
        raise InvalidSnapshot(
            "snapshot is too small for one sample",
            got=f"{sum(stream_tokens)} tokens in {len(stream_tokens)} shard(s)",
            wanted=f"a shard of at least {context + 1} tokens",
            do="Use more data, a smaller model.context, or data.batching packed.",
        )
