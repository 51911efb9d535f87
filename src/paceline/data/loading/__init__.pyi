from .batch import PADDING as PADDING, Batch as Batch, Position as Position
from .cache import CachedFile as CachedFile, DiskCache as DiskCache, PartialFile as PartialFile
from .columns import (
    ShardOrder as ShardOrder,
    choose_columns as choose_columns,
    columns_by as columns_by,
    copies as copies,
    fewest_shards as fewest_shards,
    group_shards as group_shards,
    shards_for_columns as shards_for_columns,
    tokens_seen as tokens_seen,
)
from .fetch import Fetcher as Fetcher
from .shards import (
    Conversation as Conversation,
    Document as Document,
    ShardCache as ShardCache,
    close_later as close_later,
    content_digest as content_digest,
    documents as documents,
)
from .stream import PlannedStream as PlannedStream, open_stream as open_stream
from .transform import (
    ProcessTransform as ProcessTransform,
    TransformedSamples as TransformedSamples,
    TransformFailed as TransformFailed,
    open_transforms as open_transforms,
    require_allowed as require_allowed,
    require_runnable as require_runnable,
)
