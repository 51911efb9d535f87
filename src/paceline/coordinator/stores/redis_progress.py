"""The progress store in Redis, from which standbys read; written in the background.

Correctness does not depend on it. ``put`` is a dictionary update; a thread sends the newest values
twice a second in one round trip. After a failure Redis is not called for a while, longer each time;
reads then return nothing at once. Lost data is sent again: a missing marker, or any error, makes
the thread send everything that it was given since the term began.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import redis
from pydantic import ValidationError
from redis.backoff import NoBackoff
from redis.retry import Retry

from paceline.errors import InvalidProfile, ServiceUnavailable
from paceline.schemas.records import WorkerProgress

log = logging.getLogger(__name__)

SEND_S = 0.5  # between two round trips
ANSWER_S = 0.5  # Redis's time to answer
SHUN_S = (1.0, 5.0)  # pause after a failure: the first, the longest
FIELDS_A_CALL = 1_000
MOST_PARTS = 200_000  # held here; further ones are not stored
MOST_BEATS = 100_000  # of workers; beyond it, only the newest call's are held
FORGET_S = 24 * 3600  # after the last change Redis expires the keys


class RedisProgress:
    """Implements the Progress contract with one Redis (or Valkey)."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str,
        user: str = "",
        password: str = "",
        ca: Path | None = None,
    ) -> None:
        """Nothing is connected yet; raises InvalidProfile for an invalid URL."""
        options: dict[str, object] = {} if ca is None else {"ssl_ca_certs": str(ca)}
        try:
            self._redis = redis.Redis.from_url(
                url,
                username=user or None,
                password=password or None,
                socket_timeout=ANSWER_S,
                socket_connect_timeout=ANSWER_S,
                retry=Retry(NoBackoff(), 0),  # this class decides when to retry
                decode_responses=True,
                **options,
            )
        except ValueError as error:
            raise InvalidProfile("no URL of a Redis", got=f"{url}: {error}") from error
        self._where = url
        self._prefix = prefix
        self._marker = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, WorkerProgress]] = {}  # everything, by deployment
        self._beats: dict[str, float] = {}
        self._new: set[tuple[str, str]] = set()
        self._new_beats: set[str] = set()
        self._old_beats = False  # Redis has some that must be deleted
        self._dropped: set[str] = set()
        self._parts = 0
        self._all = True  # the next round sends everything
        self._shunned_until_s = 0.0
        self._shun_s = 0.0
        self._healthy = True
        self._version = ""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def backend(self) -> str:
        """Return ``redis`` and its version, once it answered."""
        return f"redis {self._version}".strip()

    @property
    def healthy(self) -> bool:
        """Return whether the last exchange succeeded."""
        return self._healthy

    def begin(self) -> None:
        """Drop what was stored in an earlier term; Redis keeps its values until replaced."""
        with self._lock:
            self._known, self._beats, self._parts = {}, {}, 0
            self._new, self._new_beats, self._dropped = set(), set(), set()

    def put(
        self, parts: Mapping[tuple[str, str], WorkerProgress], beats: Mapping[str, float]
    ) -> None:
        """Hold the newest values for the next round."""
        with self._lock:
            for (deployment_id, worker_id), part in parts.items():
                known = self._known.setdefault(deployment_id, {})
                if worker_id not in known:
                    if self._parts >= MOST_PARTS:
                        continue
                    self._parts += 1
                known[worker_id] = part
                self._new.add((deployment_id, worker_id))
                self._dropped.discard(deployment_id)
            self._beats.update(beats)
            if len(self._beats) > MOST_BEATS:  # most are of workers that were pruned long ago
                self._beats, self._new_beats, self._old_beats = dict(beats), set(), True
            self._new_beats.update(beats)
            self._begin()

    def get(self, deployment_id: str) -> dict[str, WorkerProgress]:
        """Return Redis's values; nothing where it is unavailable."""
        raw = self._read(self._key("parts", deployment_id))
        found = {}
        for worker_id, text in raw.items():
            with contextlib.suppress(ValidationError):  # of another version: stored again later
                found[worker_id] = WorkerProgress.model_validate_json(text)
        return found

    def beats(self) -> dict[str, float]:
        """Return Redis's values; nothing where it is unavailable."""
        found = {}
        for worker_id, text in self._read(self._key("beats")).items():
            with contextlib.suppress(ValueError):
                found[worker_id] = float(text)
        return found

    def drop(self, deployment_id: str) -> None:
        """Make the next round delete a deployment."""
        with self._lock:
            self._parts -= len(self._known.pop(deployment_id, {}))
            self._new = {each for each in self._new if each[0] != deployment_id}
            self._dropped.add(deployment_id)
            self._begin()

    def close(self) -> None:
        """Send pending values, for a second at most."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(2 * ANSWER_S + SEND_S)
        self._redis.close()

    # --- inside ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._thread is None and not self._closing.is_set():
            self._thread = threading.Thread(target=self._send_on, name="progress", daemon=True)
            self._thread.start()

    def _send_on(self) -> None:
        while not self._closing.wait(SEND_S):
            self._round()
        self._round()

    def _round(self) -> None:
        """Send new values, if there are any, and all values where Redis may have lost some."""
        nothing = not (self._new or self._new_beats or self._dropped)
        if nothing or time.monotonic() < self._shunned_until_s:
            return
        try:
            with self._guarded():
                answer = self._redis.get(self._key("marker"))
                if not self._version:
                    self._version = str(self._redis.info("server")["redis_version"])
                self._send(everything=self._all or answer != self._marker)
                self._all = False
        except ServiceUnavailable as error:
            self._all = True
            log.info("progress is not shared for the moment: %s", error)

    def _send(self, *, everything: bool) -> None:
        with self._lock:
            if everything:
                self._new = {(d, w) for d, known in self._known.items() for w in known}
                self._new_beats = set(self._beats)
            parts: dict[str, dict[str, WorkerProgress]] = {}
            for deployment_id, worker_id in self._new:
                part = self._known[deployment_id][worker_id]
                parts.setdefault(deployment_id, {})[worker_id] = part
            beats = {worker_id: str(self._beats[worker_id]) for worker_id in self._new_beats}
            dropped, old_beats = self._dropped, self._old_beats
            self._old_beats = False
            self._new, self._new_beats, self._dropped = set(), set(), set()
        pipe = self._redis.pipeline(transaction=False)
        for deployment_id in dropped:
            pipe.delete(self._key("parts", deployment_id))
        for deployment_id, some in parts.items():
            key = self._key("parts", deployment_id)
            texts = {worker_id: part.model_dump_json() for worker_id, part in some.items()}
            self._put_fields(pipe, key, texts)
        if old_beats:
            pipe.delete(self._key("beats"))
        self._put_fields(pipe, self._key("beats"), beats)
        pipe.set(self._key("marker"), self._marker, ex=FORGET_S)
        try:
            pipe.execute()
        except BaseException:
            with self._lock:
                self._dropped |= dropped - self._known.keys()
                self._old_beats |= old_beats
                self._new_beats |= beats.keys() & self._beats.keys()  # so that they are sent again
                self._new |= {(d, w) for d, some in parts.items() for w in some if d in self._known}
            raise

    def _put_fields(self, pipe: redis.client.Pipeline, key: str, fields: dict[str, str]) -> None:
        rows = list(fields.items())
        for at in range(0, len(rows), FIELDS_A_CALL):
            pipe.hset(key, mapping=dict(rows[at : at + FIELDS_A_CALL]))
        if rows:
            pipe.expire(key, FORGET_S)

    def _read(self, key: str) -> dict[str, str]:
        if time.monotonic() < self._shunned_until_s:
            return {}
        try:
            with self._guarded():
                found: dict[str, str] = self._redis.hgetall(key)
                return found
        except ServiceUnavailable as error:
            log.info("progress cannot be read for the moment: %s", error)
            return {}

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Translate errors, and pause the calls after one; raises ServiceUnavailable."""
        try:
            yield
        except (redis.RedisError, OSError) as error:
            first, most = SHUN_S
            self._shun_s = min(most, max(first, 2 * self._shun_s))
            self._shunned_until_s = time.monotonic() + self._shun_s
            self._healthy = False
            raise ServiceUnavailable(
                "Redis does not answer",
                got=f"{type(error).__name__}: {error}",
                where=self._where,
                do="Nothing is lost but what standbys show; bring it back.",
            ) from error
        self._healthy, self._shun_s = True, 0.0

    def _key(self, *parts: str) -> str:
        return ":".join((self._prefix, *parts))
