"""The lanes a node follows, on its disk: an agent that is restarted goes on without being told.

The coordinator may be away just then, and others wait for what this node forwards. Lanes are kept
with their manifest until their deployment has ended here. What a kept lane says may be out of date;
newer lanes replace it as always.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from pathlib import Path

from pydantic import ValidationError

from paceline.errors import PacelineError
from paceline.manifest import Manifest, parse_manifest
from paceline.system.files import write_durably
from paceline.wire.plan import WorkerLanes

log = logging.getLogger(__name__)

MOST = 8  # deployments at once; a node takes part in one or two
_LANES, _MANIFEST = ".lanes.json", ".manifest.json"


class Assignments:
    """Kept below ``directory``; used by one thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._epochs: dict[str, int] = {}  # of what this process kept
        directory.mkdir(parents=True, exist_ok=True)

    def keep(self, lanes: WorkerLanes, manifest: Manifest) -> None:
        """Remember ``lanes`` in place of the deployment's older ones; told of again, the same stay
        as they were kept.
        """
        if self._epochs.get(lanes.deployment_id) == lanes.epoch:
            return
        manifest_path = self._directory / f"{manifest.digest}{_MANIFEST}"
        if not manifest_path.exists():
            write_durably(manifest_path, manifest.to_bytes())
        path = self._directory / f"{lanes.deployment_id}{_LANES}"
        write_durably(path, lanes.model_dump_json().encode())
        self._epochs[lanes.deployment_id] = lanes.epoch

    def drop(self, deployment_ids: Collection[str]) -> None:
        """Forget deployments that have ended here."""
        for each in deployment_ids:
            self._epochs.pop(each, None)
        gone = [self._directory / f"{each}{_LANES}" for each in deployment_ids]
        gone = [path for path in gone if path.exists()]
        for path in gone:
            path.unlink()
        if gone:
            self._drop_manifests()

    def load(self) -> Iterator[tuple[WorkerLanes, Manifest]]:
        """Yield what was kept, newest first; what cannot be read is removed and told."""
        paths = sorted(
            self._directory.glob(f"*{_LANES}"), key=lambda path: path.stat().st_mtime, reverse=True
        )
        for number, path in enumerate(paths):
            try:
                if number >= MOST:
                    raise ValueError("too many deployments")
                lanes = WorkerLanes.model_validate_json(path.read_bytes())
                kept = self._directory / f"{lanes.manifest_digest}{_MANIFEST}"
                manifest = parse_manifest(kept.read_bytes())
            except (OSError, ValueError, ValidationError, PacelineError) as error:
                log.warning("lanes forgotten: %s: %s", path.name, error)
                path.unlink(missing_ok=True)
            else:
                yield lanes, manifest
        self._drop_manifests()

    def _drop_manifests(self) -> None:
        lanes = [path.read_bytes() for path in self._directory.glob(f"*{_LANES}")]
        for path in self._directory.glob(f"*{_MANIFEST}"):
            digest = path.name.removesuffix(_MANIFEST).encode()
            if not any(digest in each for each in lanes):
                path.unlink()
