from .parquet_process import ParquetProcess as ParquetProcess
from .sample import (
    MAX_DOCUMENT_BYTES as MAX_DOCUMENT_BYTES,
    MAX_SAMPLE_BYTES as MAX_SAMPLE_BYTES,
    TOO_LARGE as TOO_LARGE,
    Array as Array,
    Fields as Fields,
    Sample as Sample,
    UnusableSample as UnusableSample,
    check_sample as check_sample,
    clean_array as clean_array,
    length_of as length_of,
    pack_sample as pack_sample,
    unpack_sample as unpack_sample,
)
from .shard_file import (
    LAYOUT as LAYOUT,
    ColumnWriter as ColumnWriter,
    ShardSamples as ShardSamples,
    column_of as column_of,
    read_columns as read_columns,
)
from .tar import read_tar as read_tar
from .text import SUFFIXES as SUFFIXES, open_reader as open_reader, read_jsonl as read_jsonl
