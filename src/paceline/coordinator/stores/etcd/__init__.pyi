from .changes import (
    INLINE_BYTES as INLINE_BYTES,
    MAX_TXN_BYTES as MAX_TXN_BYTES,
    MAX_TXN_OPS as MAX_TXN_OPS,
    Blob as Blob,
    batches as batches,
    blob_named as blob_named,
    join_blob as join_blob,
    normalize_changes as normalize_changes,
    read_journal as read_journal,
    write_journal as write_journal,
)
from .client import EtcdAccess as EtcdAccess, request as request
from .coordination import EtcdCoordination as EtcdCoordination
