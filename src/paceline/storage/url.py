"""Names of objects: ``s3://bucket/key``. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.errors import InvalidInput

SCHEME = "s3://"
MAX_URL = 2048
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """The store's metadata of one object; ``etag`` (unquoted) pins its content."""

    url: str
    size: int
    etag: str
    version_id: str | None = None


def parse_url(url: str) -> tuple[str, str]:
    """Return the bucket and key of ``s3://bucket/key``; the key may be empty.

    Raises InvalidInput for another scheme, a bad bucket name, or a key with a relative or empty
    component or a control character.
    """

    def bad(what: str, got: object) -> InvalidInput:
        return InvalidInput(what, got=got, wanted="s3://bucket/key", where=url[:200])

    if not url.startswith(SCHEME):
        raise bad("not an object's URL", repr(url[:200]))
    if len(url) > MAX_URL:
        raise bad("URL is too long", f"{len(url)} characters")
    bucket, _, key = url.removeprefix(SCHEME).partition("/")
    if "@" in bucket:
        raise InvalidInput(
            "an S3 URL has no user and password",
            got="an @ in the bucket's name",
            wanted="s3://bucket/key",
            where=url[:200],
            do="Credentials come from AWS's own places: environment, profile, role.",
        )
    if not _BUCKET.fullmatch(bucket):
        raise InvalidInput(
            "bad bucket name",
            got=repr(bucket),
            wanted="s3://bucket/key, the bucket 3 to 63 small letters, digits, dots and hyphens",
            where=url[:200],
        )
    if any(part in (".", "..") for part in key.split("/")):
        raise bad("key has a relative component", repr(key))
    if "//" in f"/{key}":
        raise bad("key has an empty component", repr(key))
    if any(letter < " " or letter == "\x7f" or "\ud800" <= letter <= "\udfff" for letter in key):
        raise bad("key has a control character or half of a surrogate pair", repr(key))
    return bucket, key


def is_within(url: str, places: Iterable[str]) -> bool:
    """Return whether the object or prefix ``url`` is in one of ``places``: buckets, or prefixes as
    ``bucket/prefix``, which is a directory: ``b/m`` holds ``b/m/1`` and not ``b/m2``.
    """
    here = "/".join(parse_url(url)).rstrip("/") + "/"
    return any(here.startswith(place.rstrip("/") + "/") for place in places)


def join_url(prefix_url: str, *parts: str) -> str:
    """Return ``prefix_url`` and ``parts`` joined by single slashes."""
    return "/".join([prefix_url.rstrip("/"), *(part.strip("/") for part in parts)])
