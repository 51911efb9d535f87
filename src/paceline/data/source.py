"""Data sources: a directory, one file, a bucket prefix, or the running Python's standard library.

Files are read in an order that is a function of name and seed, never of a directory's listing, so
that a byte budget samples the whole source and not only the first names. Also joins precomputed
features to samples by key. Does not depend on splits or shards.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.config import DataSettings
from paceline.data.build_scratch import Catalog
from paceline.data.formats import (
    MAX_DOCUMENT_BYTES,
    SUFFIXES,
    TOO_LARGE,
    Fields,
    Sample,
    UnusableSample,
    open_reader,
)
from paceline.errors import InvalidInput, SourceMissing
from paceline.storage import ObjectStore, join_url

STDLIB = "stdlib"
STDLIB_BYTES = 16 * 1024 * 1024
FETCHED_AHEAD = 4  # files of a bucket on the scratch disk, at most
_SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "__pycache__", "node_modules"}


@dataclass(frozen=True)
class Source:
    """An opened source: its name in the record, and the location of its files."""

    name: str
    where: str  # a directory, or s3://bucket/prefix
    only: str | None = None  # only this file of the directory
    suffixes: tuple[str, ...] = ("",)
    most_bytes: int = sys.maxsize  # that a snapshot takes where its settings do not say

    @property
    def is_remote(self) -> bool:
        return self.where.startswith("s3://")


def open_source(source: str, settings: DataSettings) -> Source:
    """Return the source called ``source``.

    Raises SourceMissing, or InvalidInput for the standard library in a format other than text.
    """
    suffixes = SUFFIXES[settings.format]
    if source == STDLIB:
        if settings.format != "text":
            raise InvalidInput(
                "the standard library is text",
                got=f"data.format {settings.format!r}",
                wanted="'text'",
            )
        name = f"python-stdlib-{platform.python_version()}"
        where = sysconfig.get_path("stdlib")
        return Source(name, where, suffixes=(".py",), most_bytes=STDLIB_BYTES)
    if source.startswith("s3://"):
        return Source("objects", source.rstrip("/"), suffixes=suffixes)
    path = Path(source)
    if path.is_dir():
        return Source("directory", str(path), suffixes=suffixes)
    if path.is_file() and settings.format != "text":
        return Source("file", str(path.parent), path.name, suffixes)
    raise SourceMissing(
        f"no directory of {settings.format} files here",
        got="a file" if path.exists() else "nothing",
        wanted="a directory, s3://bucket/prefix, or 'stdlib'",
        where=path.absolute(),
        do="Set data.source to where the files are.",
    )


def list_files(
    source: Source, catalog: Catalog, store: ObjectStore, seed: int
) -> Iterator[UnusableSample]:
    """Add the source's files to ``catalog``; yield those that cannot be used."""
    for name, size, reason in _objects(source, store) if source.is_remote else _walk(source):
        if reason is None and not name.endswith(source.suffixes):
            if "" not in source.suffixes and not source.name.startswith("python"):
                yield UnusableSample(name, f"not a {' or '.join(source.suffixes)} file")
        elif reason is not None:
            yield UnusableSample(name, reason)
        else:
            catalog.add_file(_rank(name, seed), name, size)


def read_samples(
    source: Source, catalog: Catalog, store: ObjectStore, settings: DataSettings, scratch: Path
) -> Iterator[Sample | UnusableSample]:
    """Yield every sample of the source, file by file in catalog order.

    Objects are downloaded a few ahead into ``scratch`` and removed after reading.
    """
    fields = Fields(
        settings.text_field, settings.key_field, settings.slice_field, settings.slice_fields
    )
    wanted: Iterator[tuple[str, Path | UnusableSample]]
    if source.is_remote:
        wanted = _fetched(source, catalog, store, scratch, settings.format == "text")
    else:
        wanted = ((name, Path(source.where) / name) for name, _ in catalog.files())
    with open_reader(settings.format) as read:
        for name, place in wanted:
            if isinstance(place, UnusableSample):
                yield place
                continue
            try:
                yield from read(place, name, fields)
            finally:
                if source.is_remote:
                    place.unlink(missing_ok=True)


def _walk(source: Source) -> Iterator[tuple[str, int, str | None]]:
    root = Path(source.where)
    for parent, directories, names in os.walk(root):
        directories[:] = (
            each for each in directories if each not in _SKIPPED_DIRECTORIES and each[0] != "."
        )
        for each in names:
            if each.startswith(".") or (source.only and (parent, each) != (str(root), source.only)):
                continue
            path = Path(parent) / each
            name = path.relative_to(root).as_posix()
            shown = name.encode(errors="surrogateescape").decode(errors="backslashreplace")
            yield (shown, *_regular(path, name))


def _regular(path: Path, name: str) -> tuple[int, str | None]:
    try:
        name.encode("utf-8")
        if path.is_symlink() or not path.is_file():
            return 0, "not a regular file"
        return path.stat().st_size, None
    except UnicodeEncodeError:
        return 0, "name is not UTF-8"
    except OSError as error:
        return 0, error.strerror or "unreadable"


def _objects(source: Source, store: ObjectStore) -> Iterator[tuple[str, int, str | None]]:
    prefix = f"{source.where}/"
    found = store.list(source.where)
    if not found:
        raise SourceMissing(
            "no objects here", where=prefix, do="Set data.source to a prefix with files below it."
        )
    for info in found:
        name = info.url.removeprefix(prefix)
        if name and not name.endswith("/"):
            yield name, info.size, None


def _fetched(
    source: Source, catalog: Catalog, store: ObjectStore, scratch: Path, is_text: bool
) -> Iterator[tuple[str, Path | UnusableSample]]:
    def fetch(number: int, name: str, size: int) -> tuple[str, Path | UnusableSample]:
        if is_text and size > MAX_DOCUMENT_BYTES:
            return name, UnusableSample(name, TOO_LARGE)
        place = scratch / f"source-{number}"
        store.download_file(join_url(source.where, name), place)
        return name, place

    waiting: deque[Future[tuple[str, Path | UnusableSample]]] = deque()
    with ThreadPoolExecutor(FETCHED_AHEAD, thread_name_prefix="source") as pool:
        try:
            for number, (name, size) in enumerate(catalog.files()):
                waiting.append(pool.submit(fetch, number, name, size))
                if len(waiting) > FETCHED_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _rank(name: str, seed: int) -> bytes:
    return hashlib.sha256(f"order:{seed}:{name}".encode()).digest()


# Precomputed features: Parquet files whose rows are joined to samples by key.
#
# For a key without a row, the settings choose between an error and skipping the sample; a key with
# two rows is always an error.


def load_features(
    files: Sequence[str], key_field: str, catalog: Catalog, store: ObjectStore, scratch: Path
) -> int:
    """Add the rows of all ``files`` (paths or s3:// URLs) to ``catalog``; return their number.

    Raises SourceMissing, or InvalidInput for a row without key or numbers, or a duplicate.
    """
    from paceline.data.formats import ParquetProcess

    rows, fields = 0, Fields(text="", key=key_field)
    with ParquetProcess() as process:
        for number, name in enumerate(files):
            path = Path(name)
            if name.startswith("s3://"):
                path = scratch / f"features-{number}"
                store.download_file(name, path)
            elif not path.is_file():
                raise SourceMissing("no feature file here", where=name, do="Correct data.features.")
            for each in process.samples(path, path.name, fields, features=True):
                if isinstance(each, UnusableSample):
                    raise InvalidInput(
                        "feature file has an unusable row",
                        got=f"{each.key}: {each.reason}",
                        wanted="a key and numbers in each row",
                        where=name,
                        do="Correct the row, or name the key's column with data.key_field.",
                    )
                catalog.put_features(each.key, each.features)
                rows += 1
            if name.startswith("s3://"):
                path.unlink()
    return rows


def join_features(sample: Sample, catalog: Catalog, missing: str) -> Sample | UnusableSample:
    """Return ``sample`` with its features.

    Without any, raises InvalidInput where ``missing`` is ``"refuse"``, and returns Unusable where
    it is ``"skip"``.
    """
    found = catalog.features(sample.key)
    if found is None:
        if missing == "skip":
            return UnusableSample(sample.key, "no features")
        raise InvalidInput(
            "a sample has no features",
            got=f"no row with the key {sample.key!r}",
            wanted="a row of data.features for every sample",
            do="Add it, or set data.missing_features = 'skip'.",
        )
    if clash := sorted(set(found) & set(sample.features)):
        raise InvalidInput(
            "a feature has the name of a sample's own field",
            got=f"{clash[0]!r} of {sample.key!r}",
            do="Rename the column in the feature file.",
        )
    return replace(sample, features={**sample.features, **found})
