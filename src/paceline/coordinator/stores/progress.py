"""The progress store: in process memory for one replica, in Redis for several.

Correctness does not depend on it. After a failure Redis is not called for a while, longer each
time; writes are then dropped and reads return nothing, both at once. The leader sends everything
again after a failure, and now and then, because a restarted Redis is empty.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from paceline.errors import InvalidProfile
from paceline.schemas import WorkerProgress

if TYPE_CHECKING:
    import redis

log = logging.getLogger(__name__)

Found = TypeVar("Found")

ANSWER_S = 0.5  # Redis's time to answer
PAUSE_AFTER_FAILURE_S = (1.0, 5.0)  # pause after a failure: the first, the longest
FIELDS_A_CALL = 1_000
FORGET_S = 24 * 3600  # after the last change Redis expires the keys


class MemoryProgress:
    """Values that change with every heartbeat, in this process's memory.

    They may be lost at any moment; no method raises.
    """

    backend = "memory"
    healthy = True  # whether the last exchange with the backend succeeded

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[str, dict[str, WorkerProgress]] = {}
        self._beats: dict[str, float] = {}

    def put(
        self, parts: Mapping[tuple[str, str], WorkerProgress], beats: Mapping[str, float]
    ) -> None:
        """Store parts by (deployment_id, worker_id), beside those stored before, and replace all
        heartbeat times (by worker, Unix time).
        """
        with self._lock:
            for (deployment_id, worker_id), part in parts.items():
                self._parts.setdefault(deployment_id, {})[worker_id] = part
            self._beats = dict(beats)

    def get(self, deployment_id: str) -> dict[str, WorkerProgress]:
        """Return the stored parts of one deployment, by worker."""
        with self._lock:
            return dict(self._parts.get(deployment_id, {}))

    def beats(self) -> dict[str, float]:
        """Return the time of each worker's last heartbeat, where it is stored."""
        return self._beats

    def drop(self, deployment_id: str) -> None:
        with self._lock:
            self._parts.pop(deployment_id, None)

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


class RedisProgress:
    """The same in one Redis (or Valkey): while it is unavailable, writes are dropped and reads
    return nothing.
    """

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
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

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
        self._errors = (redis.RedisError, OSError)
        self._where, self._prefix = url, prefix
        self._paused_until_s = self._pause_s = 0.0
        self._version = ""
        self.healthy = True

    @property
    def backend(self) -> str:
        """Return ``redis`` and its version, once it answered."""
        return f"redis {self._version}".strip()

    def put(
        self, parts: Mapping[tuple[str, str], WorkerProgress], beats: Mapping[str, float]
    ) -> None:
        texts: dict[str, dict[str, str]] = {}
        for (deployment_id, worker_id), part in parts.items():
            texts.setdefault(deployment_id, {})[worker_id] = part.model_dump_json()

        def send() -> None:
            if not self._version:
                self._version = str(self._redis.info("server")["redis_version"])
            pipe = self._redis.pipeline()
            for deployment_id, some in texts.items():
                self._put_fields(pipe, self._key("parts", deployment_id), some)
            pipe.delete(self._key("beats"))  # those of workers that were pruned, too
            times = {worker_id: str(at) for worker_id, at in beats.items()}
            self._put_fields(pipe, self._key("beats"), times)
            pipe.execute()

        self._call(send, None)

    def get(self, deployment_id: str) -> dict[str, WorkerProgress]:
        found = {}
        for worker_id, text in self._read(self._key("parts", deployment_id)).items():
            with contextlib.suppress(ValidationError):  # of another version: stored again later
                found[worker_id] = WorkerProgress.model_validate_json(text)
        return found

    def beats(self) -> dict[str, float]:
        return {worker_id: float(at) for worker_id, at in self._read(self._key("beats")).items()}

    def drop(self, deployment_id: str) -> None:
        self._call(lambda: self._redis.delete(self._key("parts", deployment_id)), None)

    def close(self) -> None:
        self._redis.close()

    def _put_fields(self, pipe: redis.client.Pipeline, key: str, fields: dict[str, str]) -> None:
        rows = list(fields.items())
        for at in range(0, len(rows), FIELDS_A_CALL):
            pipe.hset(key, mapping=dict(rows[at : at + FIELDS_A_CALL]))
        pipe.expire(key, FORGET_S)

    def _read(self, key: str) -> dict[str, str]:
        return self._call(lambda: self._redis.hgetall(key), {})

    def _call(self, work: Callable[[], Found], otherwise: Found) -> Found:
        """Return the result of ``work``, or ``otherwise`` where Redis is unavailable."""
        if time.monotonic() < self._paused_until_s:
            return otherwise
        try:
            found = work()
        except self._errors as error:
            first_s, longest_s = PAUSE_AFTER_FAILURE_S
            self._pause_s = min(longest_s, max(first_s, 2 * self._pause_s))
            self._paused_until_s = time.monotonic() + self._pause_s
            self.healthy = False
            log.info("progress is not shared now: Redis at %s: %s", self._where, error)
            return otherwise
        self.healthy, self._pause_s = True, 0.0
        return found

    def _key(self, *parts: str) -> str:
        return ":".join((self._prefix, *parts))


Progress = MemoryProgress | RedisProgress
