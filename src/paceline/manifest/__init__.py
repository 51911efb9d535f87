"""A model as files, chunks, pieces and digests: build, parse, publish, fetch, verify.

It works on directories and object URLs, and does not depend on workers, topologies or sockets.
"""

from paceline.manifest.build import build_manifest
from paceline.manifest.claim import CLAIM_FILE, discard_unfinished
from paceline.manifest.model import (
    ACTIVE,
    MANIFEST_FILE,
    Chunk,
    FileEntry,
    Manifest,
    Piece,
    Signature,
    version_key,
)
from paceline.manifest.parse import MAX_MANIFEST_BYTES, parse_manifest
from paceline.manifest.publish import fetch_manifest, publish_model, write_manifest
from paceline.manifest.signing import (
    TrustPolicy,
    load_key,
    new_key,
    public_key,
    sign_manifest,
    verify_signature,
)
from paceline.manifest.sizes import Sizes, choose_sizes
from paceline.manifest.verify import verify_directory

__all__ = [
    "ACTIVE",
    "CLAIM_FILE",
    "MANIFEST_FILE",
    "MAX_MANIFEST_BYTES",
    "Chunk",
    "FileEntry",
    "Manifest",
    "Piece",
    "Signature",
    "Sizes",
    "TrustPolicy",
    "build_manifest",
    "choose_sizes",
    "discard_unfinished",
    "fetch_manifest",
    "load_key",
    "new_key",
    "parse_manifest",
    "public_key",
    "publish_model",
    "sign_manifest",
    "verify_directory",
    "verify_signature",
    "version_key",
    "write_manifest",
]
