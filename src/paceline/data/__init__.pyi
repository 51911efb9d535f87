from .batching.fill import token_dtype as token_dtype
from .build import SkippedSamples as SkippedSamples, build_snapshot as build_snapshot
from .chat import (
    ChatTemplate as ChatTemplate,
    snapshot_template as snapshot_template,
    template_config as template_config,
    template_files as template_files,
)
from .child_process import (
    DONE as DONE,
    FAILED as FAILED,
    ChildProcess as ChildProcess,
    how_ended as how_ended,
    serve as serve,
)
from .expectations import expectations_text as expectations_text
from .loading.batch import Batch as Batch
from .loading.shards import (
    WHITE_SPACE as WHITE_SPACE,
    Conversation as Conversation,
    Document as Document,
    ShardCache as ShardCache,
    content_digest as content_digest,
    documents as documents,
)
from .loading.stream import PlannedStream as PlannedStream, open_stream as open_stream
from .snapshot import (
    BYTE_VOCABULARY as BYTE_VOCABULARY,
    REJECTED_AT as REJECTED_AT,
    Column as Column,
    Shard as Shard,
    Snapshot as Snapshot,
    SnapshotRecord as SnapshotRecord,
    Split as Split,
    assign_splits as assign_splits,
    in_held_out as in_held_out,
    load_snapshot as load_snapshot,
    require_columns as require_columns,
    require_purpose as require_purpose,
    require_readable as require_readable,
    require_whole as require_whole,
    root_url as root_url,
    snapshot_url as snapshot_url,
    store_at as store_at,
)
from .source import STDLIB as STDLIB
from .tokenizer import (
    Tokenizer as Tokenizer,
    open_tokenizer as open_tokenizer,
    tokenizer_file as tokenizer_file,
    tokenizer_of as tokenizer_of,
)
from .validation import (
    ValidationReport as ValidationReport,
    drift_of as drift_of,
    read_table as read_table,
    require_expectations as require_expectations,
    require_not_refused as require_not_refused,
    require_valid as require_valid,
    validate_snapshot as validate_snapshot,
    validation_inputs as validation_inputs,
    validation_url as validation_url,
)
from .validation_page import validation_page as validation_page
