"""Reading part of an object into memory that the caller owns, pinned to one content.

A read that breaks off goes on where it stopped; an object that was replaced is an error, never a
mix. Some servers ignore ``If-Match`` (rclone among them), so the answer's ETag and total size are
compared here as well.
"""

from __future__ import annotations

import random
import re
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from paceline.errors import ServiceUnavailable, SourceChanged
from paceline.objects.translate import translated
from paceline.objects.url import parse_url

ATTEMPTS = 4
BACKOFF_S = 0.1  # doubles with each attempt, times a jitter of 0.5 to 1.5
STEP = 1024 * 1024  # urllib3 copies each read once; small steps keep that copy in the cache

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


@dataclass(frozen=True, slots=True)
class PinnedObject:
    """One content of one object: what a read must find, or raise SourceChanged."""

    url: str
    etag: str
    size: int | None  # None: not checked


def read_range(
    client: Any, endpoint_url: str, pinned: PinnedObject, offset: int, view: memoryview
) -> None:
    """Fill ``view`` with the object's bytes from ``offset`` on.

    Raises SourceChanged, SourceMissing, AccessDenied, or ServiceUnavailable: at once where the
    request itself fails (botocore tried that again already), after ``ATTEMPTS`` broken bodies.
    """
    target = view.cast("B")
    done = attempt = 0
    while done < len(target):
        attempt += 1
        start = done
        with translated(endpoint_url, pinned.url):
            answer = _request(client, pinned, offset + done, len(target) - done)
        try:
            with translated(endpoint_url, pinned.url), closing(answer["Body"]) as body:
                _check(answer, pinned, offset + done, len(target) - done)
                while done < len(target) and (got := body.readinto(target[done : done + STEP])):
                    done += got
            if done < len(target):
                raise ServiceUnavailable(
                    "S3 sent a short body",
                    got=f"{done} bytes",
                    wanted=f"{len(target)} bytes from {offset}",
                    where=f"{pinned.url} on {endpoint_url}",
                    do="Try again; if it stays, check the server and what stands before it.",
                )
        except ServiceUnavailable:
            if attempt >= ATTEMPTS:
                raise
            if done == start:  # no progress: back off; a body cut midway may go on at once
                time.sleep(BACKOFF_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))


def _request(client: Any, pinned: PinnedObject, offset: int, length: int) -> dict[str, Any]:
    bucket, key = parse_url(pinned.url)
    pin = {"IfMatch": f'"{pinned.etag}"'} if pinned.etag else {}
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
    if got_etag != pinned.etag:
        raise changed(f"ETag {got_etag}", f"ETag {pinned.etag}")
    got_range = str(answer.get("ContentRange", ""))
    match = _CONTENT_RANGE.fullmatch(got_range)
    if match is None:  # a server that ignores Range would send the object from its start
        whole = int(answer.get("ContentLength", -1))
        if offset == 0 and whole == length and pinned.size in (None, whole):
            return
        raise ServiceUnavailable(
            "S3 ignored the range", got=got_range or "no Content-Range", where=pinned.url
        )
    first, last, total = (int(group) for group in match.groups())
    if pinned.size is not None and total != pinned.size:
        raise changed(f"{total} bytes", f"{pinned.size} bytes")
    if first != offset or last != offset + length - 1:
        raise changed(f"bytes {first}-{last}", f"bytes {offset}-{offset + length - 1}")
