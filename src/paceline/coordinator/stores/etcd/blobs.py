"""Long values, on their own keys: put before anything names them, collected once nothing does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from paceline.coordinator.stores.etcd.client import EtcdClient
from paceline.coordinator.stores.etcd.layout import Blob, Delete, Layout
from paceline.coordinator.stores.etcd.messages import put, request
from paceline.coordinator.stores.etcd.mirror import Mirror

log = logging.getLogger(__name__)

NAMES_A_PAGE = 1_000


class Blobs:
    """The blobs of one installation, as the leader of one term puts and collects them."""

    def __init__(self, client: EtcdClient, layout: Layout, mirror: Mirror) -> None:
        self._client, self._layout, self._mirror = client, layout, mirror
        self._written: set[str] = set()  # in this term, since the last collection

    def begin(self) -> None:
        """Begin a term: what others wrote may have been collected."""
        self._written = set()

    @property
    def written(self) -> int:
        """Return how many were put since the last collection."""
        return len(self._written)

    def put(self, blob: Blob, fenced: Callable[[Sequence[Any]], None]) -> None:
        """Put a blob's parts, each in a transaction that ``fenced`` carries out."""
        if blob.digest in self._written:
            return
        for number, part in enumerate(blob.parts):
            fenced([put(self._layout.part(blob.digest, number), part)])
        self._written.add(blob.digest)

    def unnamed(self) -> list[Delete]:
        """Return what to delete: every blob that is there and that nothing names now."""
        named = self._mirror.blobs()
        start, end = self._layout.below("blobs")
        there: set[str] = set()
        more = True
        while more:
            message = request(
                "RangeRequest", key=start, range_end=end, limit=NAMES_A_PAGE, keys_only=True
            )
            answer = self._client.call("Range", message)
            there |= {self._layout.parts_of(kv.key)[1] for kv in answer.kvs}
            more = answer.more
            if more:
                start = answer.kvs[-1].key + b"\0"
        self._written.clear()
        gone = sorted(there - named)
        if gone:
            log.info("%d blobs of %d are named by nothing", len(gone), len(there))
        return [Delete(*self._layout.below("blobs", digest)) for digest in gone]
