"""Inspects a node's own disk, on that node: which model, which version, every byte.

Run inside a node's Dask worker, so it imports nothing heavy. It uses no network, and changes
nothing except that a corrupt copy is set aside, because data that does not match its digest must
not stay published.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.config import load_runtime
from paceline.errors import CorruptData
from paceline.manifest import FileEntry, directory_name, parse_manifest, verify_directory
from paceline.relay.store import hub_cache
from paceline.relay.store.disk_space import missing_bytes, reclaimable_bytes
from paceline.system import process_holding


def verify_copy(
    model_id: str,
    version: str,
    manifest_digest: str,
    full: bool = False,
    *,
    worker_id: str,
) -> str:
    """Return the digest of ``worker_id``'s own copy after reading every byte of it again; ``full``,
    or ``relay.full_sha256``, also checks the SHA-256 of files and chunks.

    Raises CorruptData where there is none, where it is another model, or where a byte is wrong; a
    copy with a wrong byte is then unpublished, and the next relay fetches another.
    """
    runtime = load_runtime()
    directory = _model_directory(worker_id, model_id) / version
    try:
        manifest = parse_manifest((directory / "manifest.json").read_bytes())
    except FileNotFoundError as error:
        raise CorruptData(
            "the node has no copy", got="no manifest.json", wanted=manifest_digest, where=directory
        ) from error
    if manifest.digest != manifest_digest:
        raise CorruptData(
            "the node holds another model",
            got=manifest.digest,
            wanted=manifest_digest,
            where=directory,
        )
    try:
        verify_directory(directory, manifest, full=full or runtime.profile.relay.full_sha256)
    except CorruptData:
        _unpublish_corrupt(runtime.node_dir(worker_id), model_id, directory)
        raise
    return manifest.digest


def _unpublish_corrupt(node_dir: Path, model_id: str, directory: Path) -> None:
    """Unpublish a corrupt copy, and stop the agent, which holds its files open.

    The agent's supervisor restarts it; it then loads what the disk has.
    """
    rotten = node_dir / "store" / "rotten"  # the same filesystem: a rename, not a copy
    rotten.mkdir(exist_ok=True)
    hub_cache.hide(node_dir / "store", model_id, directory.name)
    directory.rename(rotten / f"{directory.parent.name}-{directory.name}-{time.time_ns()}")
    try:
        pid = int(json.loads((node_dir / "agent.json").read_bytes())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return  # no agent runs, or none that finished starting
    # agent.json outlives an agent that was killed, and its pid may be another process's by now;
    # the agent holds its store's lock.
    with process_holding(node_dir / "store" / ".lock", pid) as agent:
        if agent is not None:
            agent.send(signal.SIGTERM)


def has_published(model_id: str, version: str, manifest_digest: str, *, worker_id: str) -> bool:
    """Return whether ``worker_id`` has published this version (names, not bytes)."""
    path = _model_directory(worker_id, model_id) / version / "manifest.json"
    return path.is_file() and parse_manifest(path.read_bytes()).digest == manifest_digest


def missing_bytes_on_node(
    manifest_digest: str, files: Sequence[FileEntry], *, worker_id: str
) -> int:
    """Return how many bytes ``worker_id``'s disk lacks for a model of these ``files`` (their pieces
    may be left out), even if versions and leftovers are removed; 0 where it fits.
    """
    store = load_runtime().node_dir(worker_id) / "store"
    store.mkdir(parents=True, exist_ok=True)
    missing = missing_bytes(store, manifest_digest, files)
    free = shutil.disk_usage(store).free + reclaimable_bytes(store, manifest_digest)
    return max(0, missing - free)


def _model_directory(worker_id: str, model_id: str) -> Path:
    store = load_runtime().node_dir(worker_id) / "store"
    return store / "models" / directory_name(model_id)
