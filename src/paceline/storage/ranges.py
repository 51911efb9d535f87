"""Reads part of an object into memory that the caller owns, pinned to one content.

Arrived bytes are yielded at once, so that they can be verified and forwarded before the range is
complete. A read that breaks off resumes where it stopped; an object that was replaced is an error,
never a mix. Some servers ignore ``If-Match`` (rclone among them), so the answer's ETag and total
size are compared here as well.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from paceline.errors import PermanentError, ServiceUnavailable, SourceChanged
from paceline.storage.client import RetryBudget, translate_s3_errors
from paceline.storage.url import parse_url

# A step is about what arrives in STEP_S. urllib3 copies each read once: larger steps exceed the CPU
# cache; smaller ones cost calls.
MIN_STEP = 32 * 1024
MAX_STEP = 256 * 1024
STEP_S = 0.04

AttemptFailed = Callable[
    [ServiceUnavailable, float], None
]  # why, and seconds since bytes last came

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")


@dataclass(frozen=True, slots=True)
class PinnedObject:
    """One content of one object: a read finds it or raises SourceChanged."""

    url: str
    etag: str | None  # None: not checked; the caller checks a digest
    size: int | None  # None: not checked
    version_id: str | None = None  # a bucket with versioning keeps this content readable


def stream_range(
    clients: tuple[Any, Any],
    endpoint_url: str,
    pinned: PinnedObject,
    offset: int,
    view: memoryview,
    on_socket: Callable[[socket.socket], None] | None = None,
    on_failed: AttemptFailed | None = None,
) -> Iterator[int]:
    """Fill ``view`` with the object's bytes from ``offset`` on, and yield the number of bytes there
    after every step (and after every failed attempt, so that a caller can stop). ``on_socket``
    receives the connection of each answer before its body is read; ``on_failed`` receives each
    failed attempt. The first of ``clients`` is used while bytes arrive, the second after a failed
    attempt.

    Raises SourceChanged, SourceMissing, AccessDenied at once; ServiceUnavailable when the server
    sent no byte for as long as the client's read timeout allows.
    """
    target = view.cast("B")
    patience = RetryBudget()
    done, failed, moved_s = 0, False, time.monotonic()
    while done < len(target):
        try:
            answer = _one_answer(
                clients[failed], endpoint_url, pinned, offset, target, done, on_socket
            )
            for done in answer:
                patience.progressed()
                failed, moved_s = False, time.monotonic()
                yield done
        except ServiceUnavailable as error:
            failed = True
            if on_failed is not None:
                on_failed(error, time.monotonic() - moved_s)
            patience.failed(error)
            yield done


def _one_answer(
    client: Any,
    endpoint_url: str,
    pinned: PinnedObject,
    offset: int,
    target: memoryview,
    done: int,
    on_socket: Callable[[socket.socket], None] | None,
) -> Iterator[int]:
    """Request what is missing and yield as it arrives; raises where the answer ends too early."""
    with translate_s3_errors(endpoint_url, pinned.url):
        answer = _request(client, pinned, offset + done, len(target) - done)
    body = answer["Body"]
    with closing(body):
        if on_socket is not None and (sock := _socket_of(body)) is not None:
            on_socket(sock)
        _check(answer, pinned, offset + done, len(target) - done)
        step = MIN_STEP
        while done < len(target):
            began_s = time.monotonic()
            with translate_s3_errors(endpoint_url, pinned.url):
                got = body.readinto(target[done : done + step])
            if not got:
                raise ServiceUnavailable(
                    "S3 sent a short body",
                    got=f"{done} bytes",
                    wanted=f"{len(target)} bytes from {offset}",
                    where=f"{pinned.url} on {endpoint_url}",
                    do="Try again; if it stays, check the server and what stands before it.",
                )
            done += got
            yield done
            took_s = time.monotonic() - began_s  # includes the caller's time and pauses
            if took_s < STEP_S / 2:
                step = min(2 * step, MAX_STEP)
            elif took_s > 2 * STEP_S:
                step = max(step // 2, MIN_STEP)


def _socket_of(body: Any) -> socket.socket | None:
    """Return the connection of an answer's body, where this urllib3 exposes it."""
    connection = getattr(getattr(body, "_raw_stream", None), "connection", None)
    found = getattr(connection, "sock", None)
    return found if isinstance(found, socket.socket) else None


def _request(client: Any, pinned: PinnedObject, offset: int, length: int) -> dict[str, Any]:
    bucket, key = parse_url(pinned.url)
    pin = {"IfMatch": f'"{pinned.etag}"'} if pinned.etag else {}
    if pinned.version_id:
        pin["VersionId"] = pinned.version_id
    wanted = f"bytes={offset}-{offset + length - 1}"
    answer: dict[str, Any] = client.get_object(Bucket=bucket, Key=key, Range=wanted, **pin)
    return answer


def _check(answer: dict[str, Any], pinned: PinnedObject, offset: int, length: int) -> None:
    def changed(got: object, wanted: object) -> SourceChanged:
        return SourceChanged(
            "object was replaced while it was read",
            got=got,
            wanted=wanted,
            where=pinned.url,
            do="Read its head again and start over, or publish under a new version.",
        )

    got_etag = str(answer.get("ETag", "")).strip('"')
    if pinned.etag is not None and got_etag != pinned.etag:
        raise changed(f"ETag {got_etag}", f"ETag {pinned.etag}")
    got_range = str(answer.get("ContentRange", ""))
    match = _CONTENT_RANGE.fullmatch(got_range)
    if match is None:  # a server that ignores Range sends the object from its start
        whole = int(answer.get("ContentLength", -1))
        if offset == 0 and whole == length and pinned.size in (None, whole):
            return
        raise PermanentError(
            "S3 ignored the range",
            got=got_range or "no Content-Range",
            wanted=f"bytes {offset}-{offset + length - 1}",
            where=pinned.url,
            do="Use a server, or a proxy before it, that answers ranged GETs.",
        )
    first, last, total = (int(group) for group in match.groups())
    if pinned.size is not None and total != pinned.size:
        raise changed(f"{total} bytes", f"{pinned.size} bytes")
    if first != offset or last != offset + length - 1:
        raise changed(f"bytes {first}-{last}", f"bytes {offset}-{offset + length - 1}")
