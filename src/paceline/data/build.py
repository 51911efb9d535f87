"""Build a snapshot: read a source once, tokenise, join features, split by key, cut into shards.

Reads one sample at a time: only a scratch file grows with the source, and a shard is uploaded and
dropped from memory as soon as it is full. Idempotent by content: shards are named by their digest,
and the record is written last, so that a snapshot is either complete or absent.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import numpy as np

from paceline.config import DataSettings
from paceline.data.build_scratch import Catalog, Uploads
from paceline.data.chat import ChatTemplate
from paceline.data.formats import (
    Array,
    ColumnWriter,
    Sample,
    UnusableSample,
    check_sample,
    column_of,
)
from paceline.data.loading import content_digest
from paceline.data.snapshot import (
    LOSS_MASK,
    MASK_COLUMN,
    REJECTED_AT,
    REJECTED_COLUMN,
    SNAPSHOT_FILE,
    Column,
    Shard,
    Snapshot,
    SnapshotRecord,
    Split,
    draw,
    load_snapshot,
    snapshot_url,
    store_at,
)
from paceline.data.source import join_features, list_files, load_features, open_source, read_samples
from paceline.data.tokenizer import Tokenizer, open_tokenizer
from paceline.errors import InvalidInput
from paceline.schemas import canonical_json, digest_of
from paceline.storage import ObjectStore, join_url
from paceline.text import printable

SKIPPED_LISTED = 100
BATCH_BYTES = 1024 * 1024  # of samples, tokenised at once
BATCH_SAMPLES = 256
TOO_LONG = "more than max_tokens"
SCHEMA_SAMPLES = 64  # the first samples, up to BATCH_BYTES, decide the snapshot's schema
MISFITS = 1000  # after this many in a row that exceed what is left of the budget, stop

BuildProgress = Callable[[float, int, int], None]  # share (0 to 1), samples written, their bytes

SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass
class SkippedSamples:
    """What was left out: the count, and the first hundred by name with the reason."""

    count: int = 0
    _examples: list[str] = field(default_factory=list)

    def add(self, one: UnusableSample) -> None:
        self.count += 1
        self._examples.append(printable(f"{one.key[:500]}: {one.reason}")[:500])
        if len(self._examples) > 10 * SKIPPED_LISTED:
            self._examples = list(self.examples)

    @property
    def examples(self) -> tuple[str, ...]:
        """Return the first hundred by name."""
        return tuple(sorted(self._examples)[:SKIPPED_LISTED])

    @property
    def summary(self) -> str:
        """Return three examples in one line, for an error message."""
        return "; ".join(self.examples[:3])


@dataclass
class SnapshotBuilder:
    """One pass over the samples: select, tokenise, split by key, write shards.

    ``moved`` is the key of a sample that is put in the other split so that no split is empty.
    """

    settings: DataSettings
    most_bytes: int
    tokenizer: Tokenizer
    template: ChatTemplate
    catalog: Catalog
    uploads: Uploads
    scratch: Path
    skipped: SkippedSamples
    moved: str | None = None
    on_progress: BuildProgress = lambda *_: None
    samples: int = 0
    payload_bytes: int = 0
    duplicates: int = 0
    is_cut: bool = False  # the byte budget excluded samples
    columns: tuple[Column, ...] | None = None
    shards: list[Shard] = field(default_factory=list)
    _pens: dict[Split, ColumnWriter] = field(default_factory=dict)
    _longest: int = 0  # tokens of a sample
    _lowest: tuple[float, str] | None = None  # by draw: moves if a split stays empty
    _highest: tuple[float, str] | None = None

    def take(self, found: Iterable[Sample | UnusableSample]) -> None:
        """Write every sample of ``found`` that is new and within the budget."""
        expected_bytes = max(min(self.catalog.total_bytes, self.most_bytes), 1)
        for batch in _batches(self._chosen(found)):
            texts = [each.text or b"" if each.tokens is None else b"" for each in batch]
            for sample, tokens in zip(batch, self.tokenizer.encode(texts), strict=True):
                if isinstance(tokens, str):
                    self.skipped.add(UnusableSample(sample.key, tokens))
                    continue
                made = self._tokens(sample, tokens)
                mask = sample.features.get(LOSS_MASK)
                if mask is not None and len(mask) != len(made):
                    reason = f"its {LOSS_MASK!r} has {len(mask)} values for {len(made)} tokens"
                    self.skipped.add(UnusableSample(sample.key, reason))
                else:
                    self._write(sample, made)
            # compressed files hold more than their size, and uploads follow
            share = min(self.payload_bytes / expected_bytes, 0.99)
            self.on_progress(share, self.samples, self.payload_bytes)
        for split in SPLITS:
            self._flush(split)

    @property
    def key_to_move(self) -> str | None:
        """Return the key that must change split so that both splits have samples, or None."""
        held = {each.split for each in self.shards}
        if len(held) == len(SPLITS) or self._lowest is None or self._highest is None:
            return None
        return self._lowest[1] if held == {"train"} else self._highest[1]

    def record(self, source: str) -> SnapshotRecord:
        settings = self.settings
        shards = sorted(self.shards, key=lambda each: SPLITS.index(each.split))  # stable
        is_masked = MASK_COLUMN in (self.columns or ())
        return SnapshotRecord(
            purpose=settings.purpose,
            project=settings.project,
            source=source,
            seed=settings.seed,
            held_out_share=settings.held_out_share,
            shards=tuple(shards),
            documents=self.samples,
            total_bytes=sum(each.text_bytes for each in shards),
            duplicates=self.duplicates,
            skipped=self.skipped.count,
            skipped_examples=self.skipped.examples,
            format=settings.format,
            vocabulary=self.tokenizer.vocabulary,
            columns=self.columns or (),
            token_count=sum(each.tokens for each in shards),
            cut_at_bytes=self.most_bytes if self.is_cut else None,
            template_sha256=self.template.digest if is_masked and self.template.is_used else None,
            longest_tokens=self._longest if is_masked else None,
        )

    def _chosen(self, found: Iterable[Sample | UnusableSample]) -> Iterator[Sample]:
        """Yield the samples to keep: new, of one schema, within the budget."""
        left = self.most_bytes
        misfits = 0
        for sample in self._of_one_schema(map(self._joined, found)):
            if isinstance(sample, UnusableSample):
                self.skipped.add(sample)
            elif not self.catalog.is_new(b"key:" + sample.key.encode()):
                raise InvalidInput(
                    "two samples have the same key",
                    got=repr(sample.key),
                    wanted="a key a sample; in a tar, members of one key stand together",
                    do="Remove one, or set data.key_field to what tells them apart.",
                )
            elif not self.catalog.is_new(_content(sample)):
                self.duplicates += 1
            elif (size := sample.payload_bytes) > left:
                self.is_cut = True
                misfits += 1
                if misfits >= MISFITS:
                    return
            else:
                misfits = 0
                left -= size
                yield sample

    def _joined(self, each: Sample | UnusableSample) -> Sample | UnusableSample:
        if isinstance(each, Sample) and each.is_chat:
            each = self._rendered(each)
        if isinstance(each, Sample) and self.settings.features:
            return join_features(each, self.catalog, self.settings.missing_features)
        return each

    def _rendered(self, each: Sample) -> Sample | UnusableSample:
        """Return a conversation as text, tokens and their loss mask, or why it cannot be."""
        messages, tools, *answers = json.loads(each.text or b"")
        try:
            sides = [
                self.template.tokens(messages + more, tools, prompt=len(messages) if answers else 0)
                for more in answers or [[]]
            ]
        except ValueError as error:
            return UnusableSample(each.key, str(error)[:300])
        text = "\n".join(each for each, _, _ in sides)
        tokens, mask = (np.concatenate([side[part] for side in sides]) for part in (1, 2))
        features = {LOSS_MASK: mask}
        if is_pair := len(sides) > 1:
            features[REJECTED_AT] = np.array(len(sides[0][1]), np.int32)
            if sides[0][0] == sides[1][0]:
                return UnusableSample(each.key, "its answers are equal")
        most = self.settings.max_tokens
        if most and len(tokens) > most:
            both = " in both answers" * is_pair
            return UnusableSample(each.key, f"{len(tokens)} tokens{both}, {TOO_LONG} {most}")
        made = replace(each, text=text.encode(), tokens=tokens, features=features)
        return check_sample(made)

    def _of_one_schema(
        self, found: Iterable[Sample | UnusableSample]
    ) -> Iterator[Sample | UnusableSample]:
        """Yield ``found``, with samples of another schema replaced by Unusable.

        The schema is the most common one of the first samples, so that one odd sample at the start
        does not make all others unusable.
        """
        coming = iter(found)
        first: deque[Sample] = deque()
        schemas: Counter[tuple[Column, ...]] = Counter()
        held = 0
        while len(first) < SCHEMA_SAMPLES and (held < BATCH_BYTES or len(first) < 3):
            if (each := next(coming, None)) is None:
                break
            if isinstance(each, UnusableSample):
                yield each
                continue
            first.append(each)
            held += each.payload_bytes
            schemas[_columns(each)] += 1
        if self.columns is None and schemas:
            self.columns = schemas.most_common(1)[0][0]  # the first of the most common
        while first:
            yield self._fitting(first.popleft())
        for each in coming:
            yield self._fitting(each)

    def _fitting(self, each: Sample | UnusableSample) -> Sample | UnusableSample:
        if isinstance(each, UnusableSample) or (columns := _columns(each)) == self.columns:
            return each
        return UnusableSample(each.key, _difference(columns, self.columns or ()))

    def _tokens(self, sample: Sample, encoded: Array) -> Array:
        if sample.tokens is None:
            return encoded
        vocabulary = self.tokenizer.vocabulary
        low, high = int(sample.tokens.min()), int(sample.tokens.max())
        if low < 0 or high >= vocabulary.vocab_size:
            raise InvalidInput(
                "a sample has tokens of another tokenizer",
                got=f"{low} to {high} in {sample.key!r}",
                wanted=f"0 to {vocabulary.vocab_size - 1}",
                do="Set data.tokenizer to the tokenizer that made them.",
            )
        return sample.tokens

    def _write(self, sample: Sample, tokens: Array) -> None:
        drawn = (draw(sample.key, self.settings.seed), sample.key)
        self._lowest = min(self._lowest or drawn, drawn)
        self._highest = max(self._highest or drawn, drawn)
        held_out = (drawn[0] < self.settings.held_out_share) != (sample.key == self.moved)
        split: Split = "held-out" if held_out else "train"
        pen = self._pens.get(split)
        size = sample.payload_bytes
        if pen is not None and pen.nbytes + size > self.settings.shard_bytes:
            self._flush(split)
            pen = None
        if pen is None:
            pen = ColumnWriter(self.columns or (), self.tokenizer.dtype)
            self._pens[split] = pen
        # Evaluation reports bits per byte of text, so the held-out split keeps text beside its
        # tokens.
        kept = sample.text if held_out and self.tokenizer.file is not None else None
        text_bytes = len(sample.text or b"")
        pen.add(sample.key, tokens, dict(sample.features), kept, text_bytes=text_bytes)
        self.samples += 1
        self.payload_bytes += size
        self._longest = max(self._longest, len(tokens))

    def _flush(self, split: Split) -> None:
        pen = self._pens.pop(split, None)
        if pen is None:
            return
        path = self.scratch / f"shard-{len(self.shards)}"
        pen.write(path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        lengths = pen.lengths()
        shard = Shard(
            split=split,
            sha256=digest,
            bytes=path.stat().st_size,
            documents=len(pen),
            text_bytes=pen.text_bytes,
            token_count=pen.tokens,
            lengths_sha256=hashlib.sha256(lengths).hexdigest(),
        )
        self.shards.append(shard)
        self.uploads.send(shard, path, lengths)


def _batches(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    size = 0
    for each in samples:
        batch.append(each)
        size += each.payload_bytes
        if size >= BATCH_BYTES or len(batch) >= BATCH_SAMPLES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _content(sample: Sample) -> bytes:
    """Return a digest that is equal for samples with the same content except white space.

    It ensures that no held-out document has such a copy in the training split of its own snapshot.
    """
    text = sample.text
    digest = hashlib.sha256(b"" if text is None else b"text:" + content_digest(text))
    arrays = {} if sample.is_chat else dict(sample.features)
    if not sample.is_chat and sample.tokens is not None:
        arrays[""] = sample.tokens
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"\0{name}\0{array.dtype.name}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return b"content:" + digest.digest()


def _columns(sample: Sample) -> tuple[Column, ...]:
    return tuple(column_of(name, sample.features[name]) for name in sorted(sample.features))


def _kind(columns: tuple[Column, ...]) -> str:
    if REJECTED_COLUMN in columns:
        return "a pair of answers"
    return "a conversation" if MASK_COLUMN in columns else "no conversation"


def _difference(got: tuple[Column, ...], wanted: tuple[Column, ...]) -> str:
    if (kind := _kind(got)) != _kind(wanted):
        return f"{kind}, unlike most of the first samples"
    ours, theirs = ({each.name: each for each in side} for side in (got, wanted))
    if missing := sorted(set(theirs) - set(ours)):
        return f"no column {missing[0]!r}"
    if more := sorted(set(ours) - set(theirs)):
        return f"a column {more[0]!r} that the first samples do not have"
    name = next(each for each in sorted(ours) if ours[each] != theirs[each])
    one, other = ours[name], theirs[name]
    return f"column {name!r} is {one.dtype}{list(one.shape)}, not {other.dtype}{list(other.shape)}"


log = logging.getLogger(__name__)


def build_snapshot(
    source: str,
    url: str,
    settings: DataSettings,
    store: ObjectStore,
    *,
    work_dir: Path | None = None,
    on_progress: BuildProgress = lambda *_: None,
) -> Snapshot:
    """Build the snapshot of ``source`` below the data URL ``url`` and return it.

    ``source``: see ``source.open_source``; ``url``: ``s3://…`` or ``file:///…``. Existing objects
    are not uploaded again. ``on_progress`` is called after each batch. Raises SourceMissing, or
    InvalidInput without two usable samples, for two of one key, or without a required feature.
    """
    opened = open_source(source, settings)
    tokenizer = _tokenizer(settings.tokenizer, store)
    template = ChatTemplate(settings.tokenizer, store)
    if work_dir is not None:
        work_dir.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory(prefix="snapshot-", dir=work_dir) as directory,
        Catalog(Path(directory) / "catalog") as catalog,
        Uploads(url, store_at(url, store)) as uploads,
    ):
        scratch = Path(directory)
        unlisted = SkippedSamples()
        for each in list_files(opened, catalog, store, settings.seed):
            unlisted.add(each)
        if settings.features:
            load_features(settings.features, settings.key_field, catalog, store, scratch)

        def one_pass(moved: str | None) -> SnapshotBuilder:
            building = SnapshotBuilder(
                settings,
                settings.max_bytes or opened.most_bytes,
                tokenizer,
                template,
                catalog,
                uploads,
                scratch,
                deepcopy(unlisted),
                moved=moved,
                on_progress=on_progress,
            )
            building.take(read_samples(opened, catalog, store, settings, scratch))
            return building

        built = one_pass(None)
        if built.samples < 2:
            raise _too_little(built, opened.where, settings)
        _require_usable(built, unlisted.count, opened.where, settings)
        if built.key_to_move is not None:  # one split is empty: one sample moves to it
            uploads.finish()
            catalog.forget_seen()
            built = one_pass(built.key_to_move)
        record = built.record(opened.name)
        digest = digest_of(record)
        where = snapshot_url(url, digest)
        if tokenizer.file is not None:
            name = f"{tokenizer.vocabulary.sha256}.json"
            uploads.put(join_url(url, "tokenizers", name), tokenizer.file)
        if (beside := Snapshot(url=where, digest=digest, record=record).template_url) is not None:
            uploads.put(beside, template.config)
        uploads.finish()
        uploads.put(join_url(where, SNAPSHOT_FILE), canonical_json(record))
    log.info(
        "snapshot built digest=%s samples=%d tokens=%d shards=%d uploaded=%d skipped=%d",
        digest[:12],
        record.documents,
        record.token_count,
        len(record.shards),
        uploads.uploaded,
        record.skipped,
    )
    return load_snapshot(where, store)


def _tokenizer(name: str, store: ObjectStore) -> Tokenizer:
    return open_tokenizer(name, store.get_bytes(name) if name.startswith("s3://") else None)


def _require_usable(built: SnapshotBuilder, other: int, where: str, settings: DataSettings) -> None:
    """Raise InvalidInput if too many samples cannot be used; ``other``: files that are not samples.

    Not applied to text, where each file is a sample and a directory may hold anything, nor where
    samples without features are skipped by configuration.
    """
    unusable = built.skipped.count - other
    asked_for = settings.features and settings.missing_features == "skip"
    if settings.format == "text" or asked_for:
        return
    if unusable > settings.max_bad_share * (unusable + built.samples):
        raise InvalidInput(
            "most samples of the source cannot be used",
            got=f"{unusable} of {unusable + built.samples}: {built.skipped.summary}",
            wanted=f"at most {settings.max_bad_share:.0%}, data.max_bad_share",
            where=where,
            do="Mend the files, or name their fields: data.text_field, data.key_field.",
        )


def _too_little(built: SnapshotBuilder, where: str, settings: DataSettings) -> InvalidInput:
    if built.is_cut:
        do = f"Raise data.max_bytes, {built.most_bytes}."
    elif TOO_LONG in built.skipped.summary:
        do = "Raise data.max_tokens, or model.context where that is not set; or shorten them."
    else:
        skipped = built.skipped.count
        do = "Mend what was skipped, for the reason given." if skipped else "Add samples."
    what = "too little text" if settings.format == "text" else "too few samples"
    return InvalidInput(
        f"{what} for a training and a held-out split",
        got=f"{built.samples} usable sample(s), {built.skipped.count} skipped"
        + (f" ({built.skipped.summary})" if built.skipped.count else ""),
        wanted="at least 2 different ones",
        where=where,
        do=do,
    )
