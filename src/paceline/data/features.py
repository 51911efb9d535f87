"""Features that were computed before: Parquet files whose rows are joined to samples by key.

A key without a row is an error, or its sample is left out and listed, as the settings say; a key
with two rows is always an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.data.catalog import Catalog
from paceline.data.formats.sample import Sample, Unusable
from paceline.errors import InvalidInput, SourceMissing
from paceline.objects import ObjectStore


def load_features(
    files: Sequence[str], key_field: str, catalog: Catalog, store: ObjectStore, scratch: Path
) -> int:
    """Put the rows of all ``files`` (paths or s3:// URLs) into ``catalog``; return their number.

    Raises SourceMissing, or InvalidInput for a row without key or numbers, or a duplicate.
    """
    from paceline.data.formats.parquet_process import ParquetProcess

    rows = 0
    with ParquetProcess() as process:
        for number, name in enumerate(files):
            path = Path(name)
            if name.startswith("s3://"):
                path = scratch / f"features-{number}"
                store.download_file(name, path)
            elif not path.is_file():
                raise SourceMissing("no feature file here", where=name, do="Correct data.features.")
            for key, arrays in process.features(path, key_field):
                catalog.put_features(key, arrays)
                rows += 1
            if name.startswith("s3://"):
                path.unlink()
    return rows


def join_features(sample: Sample, catalog: Catalog, missing: str) -> Sample | Unusable:
    """Return ``sample`` with its features; without any it is an error where ``missing`` is
    ``"refuse"``, and left out where it is ``"skip"``."""
    found = catalog.features(sample.key)
    if found is None:
        if missing == "skip":
            return Unusable(sample.key, "no features")
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
    return sample.with_features(found)
