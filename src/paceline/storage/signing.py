"""Reads with URLs that the coordinator signs, for a process without credentials.

The client builds each request as usual; before it is sent, its URL is replaced by one that carries
a signature (a presigned URL). Conditions and ranges are headers, which the signature leaves free,
so pinning, resuming and errors are those of every other read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

REFUSED = (400, 401, 403)  # what servers answer to a signature that has expired


class Signed(NamedTuple):
    """A signed URL, and for how long it is valid from now on, in seconds."""

    url: str
    valid_s: float


# (method, s3://bucket/key, version or "") → its signed URL; may raise PacelineError
Sign = Callable[[str, str, str], Signed]


class SignedRequests:
    """Has each GET and HEAD of one client signed by ``sign``; threads may share it."""

    def __init__(self, client: Any, sign: Sign) -> None:
        self._sign = sign
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str, str], tuple[str, float]] = {}
        events = client.meta.events
        events.register("before-parameter-build.s3", self._note)
        events.register_last("request-created.s3", self._replace)
        events.register_first("needs-retry.s3", self._again)

    def _note(self, params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
        url = f"s3://{params.get('Bucket', '')}/{params.get('Key', '')}"
        context["signed_object"] = url, str(params.get("VersionId") or "")

    def _replace(self, request: Any, **_: Any) -> None:
        wanted = (str(request.method), *request.context["signed_object"])
        with self._lock:
            url, until = self._known.get(wanted, ("", 0.0))
        if time.monotonic() >= until:
            url, valid_s = self._sign(*wanted)
            with self._lock:  # used for half of its time: a read that begins late still ends
                self._known[wanted] = url, time.monotonic() + valid_s / 2
        request.url, request.params = url, {}

    def _again(self, response: Any, attempts: int, **_: Any) -> float | None:
        """Sign anew once where the server refuses: the signer's session may have ended."""
        if response is None or response[0].status_code not in REFUSED or attempts > 1:
            return None
        with self._lock:
            self._known.clear()
        return 0.0
