"""What a snapshot must have so that ranks can read it: known from its record, before any starts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline.data.snapshot import Column, Snapshot, Split
from paceline.data.splits import require_batching, require_columns
from paceline.errors import InvalidInput, InvalidSnapshot
from paceline.profile import DataSettings


def require_readable(
    snapshot: Snapshot,
    settings: DataSettings,
    *,
    context: int,
    global_batch: int,
    splits: Sequence[Split],
) -> None:
    """Raise InvalidInput or InvalidSnapshot where ``splits`` cannot be read as ``settings`` say."""
    require_columns(settings.columns, global_batch)
    require_batching(settings.batching, [each.name for each in snapshot.columns])
    require_token_features(settings.token_features, snapshot.columns)
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


def require_windows(stream_tokens: Sequence[int], context: int) -> None:
    """Raise InvalidSnapshot where no shard's stream is long enough for one window."""
    if max(stream_tokens, default=0) <= context:
        raise InvalidSnapshot(
            "snapshot is too small for one sample",
            got=f"{sum(stream_tokens)} tokens in {len(stream_tokens)} shard(s)",
            wanted=f"a shard of at least {context + 1} tokens",
            do="Use more data, a smaller model.context, or data.batching packed.",
        )
