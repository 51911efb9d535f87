"""The models that are open on this node, by digest: shared by the peer server and the deployments.

One ``Staging`` a digest, whatever number of deployments and peers use it. Versions published by an
earlier process are listed, and opened, when a peer requests one: reading the manifest of 500 GB
takes 0.13 s, and an agent should be ready before it has read five.
"""

from __future__ import annotations

import threading

from paceline.errors import NotFound, PacelineError
from paceline.manifest import Manifest
from paceline.relay.store.staging import Staging
from paceline.relay.store.store import Store, StoredVersion


class OpenModels:
    """Opens, shares and closes the models of ``store``."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._opening = threading.Lock()
        self._open: dict[str, Staging] = {}
        self._refused: set[str] = set()
        self._on_disk: dict[str, StoredVersion] = {}
        self._looking = threading.Lock()
        self._looked = False

    def find(self, digest: str, wait_s: float) -> Staging | None:
        """Return the open model, waiting up to ``wait_s`` for another thread to open it.

        An empty digest means the only open one. Raises NotFound where the model failed on this
        node, or where several are open and none is named.
        """
        if digest not in self._open:
            self._list_published()
        with self._changed:
            if not digest:
                digest = self._only()
            if digest in self._refused and digest not in self._open:
                raise NotFound("this worker gave the model up", got=digest[:12])
            self._changed.wait_for(lambda: digest in self._open or digest in self._on_disk, wait_s)
            if digest in self._open or digest not in self._on_disk:
                return self._open.get(digest)
        try:
            return self.open(self._store.manifest_of(self._on_disk[digest].path))
        except PacelineError:
            self._on_disk.pop(digest, None)  # collected, or no longer what it was
            return None

    def open(self, manifest: Manifest) -> Staging:
        """Return the model's files, resumed and filled from older versions where that is possible.

        Raises what ``Store.open`` does.
        """
        with self._opening:
            with self._changed:
                self._refused.discard(manifest.digest)
                found = self._open.get(manifest.digest)
            if found is not None and not found.closed:
                return found
            with self._changed:
                in_use = set(self._open)
            staging = self._store.open(manifest, in_use)
            try:
                self._store.reuse(staging)
            except PacelineError:
                self._store.discard(staging)
                raise
            with self._changed:
                self._open[manifest.digest] = staging
                self._changed.notify_all()
            return staging

    def refuse(self, digest: str) -> None:
        """Refuse requests for this model, which will not arrive, until it is opened again."""
        with self._changed:
            if digest not in self._open:
                self._refused.add(digest)

    def discard(self, staging: Staging) -> None:
        """Close a model and delete its data, unless it is published."""
        self._forget(staging)
        self._store.discard(staging)

    def withdraw(self, digest: str) -> bool:
        """Unpublish and close a model with a corrupt piece; opening it resumes it.

        Return whether it was published.
        """
        with self._changed:
            staging = self._open.get(digest)
            self._on_disk.pop(digest, None)
        if staging is None or not staging.published:
            return False
        self._store.withdraw(staging)
        self._forget(staging)
        staging.close()
        return True

    def release(self, staging: Staging | None) -> None:
        """Close a model that no deployment uses; peers that still read it finish their piece."""
        if staging is not None:
            self._forget(staging)
            staging.close()
            if staging.published:
                for each in self._store.versions(staging.manifest.model_id):
                    self._on_disk[each.digest] = each

    def close(self) -> None:
        with self._changed:
            for staging in self._open.values():
                staging.close()
            self._open.clear()

    def _list_published(self) -> None:
        """List once what earlier processes published."""
        with self._looking:
            if self._looked:
                return
            found = {each.digest: each for each in self._store.versions()}
            with self._changed:
                self._on_disk = found | self._on_disk
            self._looked = True

    def _only(self) -> str:
        if len(self._open) > 1:
            raise NotFound(
                "which model?", got=f"{len(self._open)} open", wanted="a manifest's digest"
            )
        return next(iter(self._open), "")

    def _forget(self, staging: Staging) -> None:
        with self._changed:
            if self._open.get(staging.manifest.digest) is staging:
                del self._open[staging.manifest.digest]
