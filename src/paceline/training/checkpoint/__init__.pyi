from .dcp_export import export_dcp as export_dcp
from .exporting import export as export
from .generations import (
    FoundGenerations as FoundGenerations,
    Generation as Generation,
    Generations as Generations,
    generation_at as generation_at,
    generations_at as generations_at,
)
from .layout import (
    NAMES_TAKEN as NAMES_TAKEN,
    Chunk as Chunk,
    Stateful as Stateful,
    TrainState as TrainState,
    assign_writes as assign_writes,
    box_of as box_of,
    chunks_of as chunks_of,
    clean as clean,
    from_bytes as from_bytes,
    index_of as index_of,
    local_of as local_of,
    reads_for as reads_for,
    stateful_of as stateful_of,
    to_bytes as to_bytes,
)
from .records import (
    BEST_METRIC as BEST_METRIC,
    COMMIT_FILE as COMMIT_FILE,
    INDEX_FILE as INDEX_FILE,
    REJECTED_FILE as REJECTED_FILE,
    Commit as Commit,
    Index as Index,
    SavedFile as SavedFile,
    StoredChunk as StoredChunk,
    StoredTensor as StoredTensor,
)
from .resume import (
    new_moment as new_moment,
    restore_best as restore_best,
    resume_newest_healthy as resume_newest_healthy,
)
from .saver import MAX_TEMPORARY_FAILURES as MAX_TEMPORARY_FAILURES, Checkpointer as Checkpointer
from .writer import Staging as Staging
