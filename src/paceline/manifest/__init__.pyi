from .build import build_manifest as build_manifest, scan_model as scan_model
from .finite import EMBEDDINGS as EMBEDDINGS, ties_embeddings as ties_embeddings
from .importing import import_model as import_model
from .model import (
    ACTIVE as ACTIVE,
    MANIFEST_FILE as MANIFEST_FILE,
    Chunk as Chunk,
    FileEntry as FileEntry,
    Manifest as Manifest,
    Piece as Piece,
    Signature as Signature,
    check_paths as check_paths,
    directory_name as directory_name,
    is_older as is_older,
    version_key as version_key,
)
from .parse import MAX_MANIFEST_BYTES as MAX_MANIFEST_BYTES, parse_manifest as parse_manifest
from .progress import (
    DIGEST as DIGEST,
    IMPORT as IMPORT,
    UPLOAD as UPLOAD,
    ProgressCounter as ProgressCounter,
    ProgressFormatter as ProgressFormatter,
    PublishProgress as PublishProgress,
)
from .publish import (
    CLAIM_FILE as CLAIM_FILE,
    discard_unfinished as discard_unfinished,
    fetch_manifest as fetch_manifest,
    publish_model as publish_model,
    published_record as published_record,
    require_sound_weights as require_sound_weights,
    write_manifest as write_manifest,
)
from .signing import (
    TrustPolicy as TrustPolicy,
    load_key as load_key,
    new_key as new_key,
    public_key as public_key,
    sign_manifest as sign_manifest,
)
from .sizes import (
    CHUNK_SECONDS as CHUNK_SECONDS,
    MAX_CHUNKS as MAX_CHUNKS,
    MIN_CHUNKS as MIN_CHUNKS,
    Sizes as Sizes,
    choose_sizes as choose_sizes,
    chunk_layout as chunk_layout,
    strands as strands,
)
from .verify import verify_directory as verify_directory
