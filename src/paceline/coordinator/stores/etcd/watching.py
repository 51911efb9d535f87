"""Follows a range of keys: the revision of its newest change, and waiting for a newer one.

A stream tells of changes at once. Whoever waits also looks once a second, so that a member that
froze with the stream open, or a gap between two streams, costs a second and no change.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import grpc

from paceline.coordinator.stores.etcd.client import EtcdClient
from paceline.coordinator.stores.etcd.messages import request
from paceline.errors import PacelineError

log = logging.getLogger(__name__)

LOOK_S = 1.0
PAUSE_S = 0.2  # before a stream that ended is opened again


class Watcher:
    """The newest revision in [start, end); the stream is opened by the first wait."""

    def __init__(
        self, client: EtcdClient, start: bytes, end: bytes, look: Callable[[], int]
    ) -> None:
        """``look`` asks etcd for the newest revision there; it may raise ServiceUnavailable."""
        self._client, self._look = client, look
        self._message = request(
            "WatchRequest",
            create_request=request("WatchCreateRequest", key=start, range_end=end),
        )
        self._changed = threading.Condition()
        self._revision = 0
        self._looked_s = float("-inf")
        self._closing = threading.Event()
        self._call: grpc.Call | None = None
        self._thread: threading.Thread | None = None

    def note(self, revision: int) -> int:
        """Take notice of a change and return the newest revision known."""
        with self._changed:
            if revision > self._revision:
                self._revision = revision
                self._changed.notify_all()
            return self._revision

    def wait(self, after: int, timeout_s: float) -> int:
        """Return the newest revision once it is above ``after``, or when the time is up."""
        until_s = time.monotonic() + timeout_s
        self._begin()
        while True:
            with self._changed:
                if self._revision > after or time.monotonic() >= until_s:
                    return max(self._revision, after)
                due_s = self._looked_s + LOOK_S - time.monotonic()
                if due_s > 0:
                    self._changed.wait(min(due_s, until_s - time.monotonic()))
                    continue
                self._looked_s = time.monotonic()
            self.note(self._look())

    def close(self) -> None:
        """End the stream."""
        self._closing.set()
        with self._changed:
            call = self._call
            self._changed.notify_all()
        if call is not None:
            call.cancel()
        if self._thread is not None:
            self._thread.join(5)

    def _begin(self) -> None:
        with self._changed:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._follow, name="etcd-watch", daemon=True)
                self._thread.start()

    def _follow(self) -> None:
        while not self._closing.is_set():
            channel = None
            try:
                channel, call = self._client.stream("Watch", self._message)
                with self._changed:
                    self._call = call
                for answer in call:
                    if answer.canceled or self._closing.is_set():
                        break
                    if answer.created:
                        self.note(self._look())  # what changed before the stream stood
                    for event in answer.events:
                        self.note(event.kv.mod_revision)
                call.cancel()
            except (grpc.RpcError, PacelineError, ValueError) as error:
                if channel is not None:
                    self._client.elsewhere(channel)
                log.debug("the watch is opened again: %s", error)
            self._closing.wait(PAUSE_S)
