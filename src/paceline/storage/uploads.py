"""Uploads one file as one object, in parts where it is large; resumes what an earlier attempt left.

A part in S3 counts as uploaded when its size and its MD5 (the ETag that S3 gives it) are those of
the file; where a server's ETags are no MD5 (server-side encryption by key) parts are sent again,
which is slower and as safe. Every body carries its Content-MD5, so that a body damaged in transit
is refused. A file that is there already is recognised by the SHA-256 in its metadata.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import (
    Cancelled,
    PermanentError,
    ServiceUnavailable,
    SourceChanged,
    SourceMissing,
)
from paceline.storage.client import RetryBudget, translate_s3_errors
from paceline.storage.url import parse_url

MIB = 1024 * 1024
PART_BYTES = 16 * MIB
MAX_PARTS = 9_000  # S3 allows 10,000
PARALLEL = 4  # parts of one file at once
DIGEST_KEY = "paceline-sha256"  # in the object's metadata
BLOCK = 1 * MIB

T = TypeVar("T")


class UploadGoneError(Exception):
    """An unfinished upload cannot be completed: it has other bytes, or it ended meanwhile."""


class Uploader:
    """Uploads one file; ``client`` is the boto3 client of an ObjectStore.

    ``stopping``, once set, ends the upload by Cancelled; its parts stay in S3.
    """

    def __init__(
        self,
        client: Any,
        endpoint_url: str,
        stopping: threading.Event | None,
        on_bytes: Callable[[int], None],
    ) -> None:
        self._client = client
        self._endpoint_url = endpoint_url
        self._on_bytes = on_bytes  # called with the bytes that S3 has received
        self._stopping = stopping or threading.Event()
        self._failed = threading.Event()  # of this file only: the other files continue

    def _ends(self) -> bool:
        return self._stopping.is_set() or self._failed.is_set()

    def upload(
        self, path: Path, url: str, sha256: str, check: Callable[[], None], *, resume: bool
    ) -> int:
        """Write the file as one object and return how many bytes of it were there already; with
        ``resume`` the parts of an unfinished upload count.

        ``check`` is called when all of it was read and before the object appears; it may raise.
        Raises UploadGoneError where the next attempt has to begin anew.
        """
        bucket, key = parse_url(url)
        where = {"Bucket": bucket, "Key": key}
        metadata = {DIGEST_KEY: sha256} if sha256 else {}
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size > 2 * PART_BYTES:
                return self._in_parts(
                    file.fileno(), size, path, url, where, metadata, check, resume
                )
            with _FileSlice(file.fileno(), 0, size, path, self._ends) as body:
                md5 = body.md5()
                check()  # a later change fails the Content-MD5
                self.with_retries(
                    url,
                    lambda: self._client.put_object(
                        **where, Body=body.rewound(), ContentMD5=_b64(md5), Metadata=metadata
                    ),
                )
            self._on_bytes(size)
            return 0

    # ── in parts ─────────────────────────────────────────────────────────────────────────────────

    def _in_parts(
        self,
        descriptor: int,
        size: int,
        path: Path,
        url: str,
        where: dict[str, str],
        metadata: dict[str, str],
        check: Callable[[], None],
        resume: bool,
    ) -> int:
        part_bytes = max(PART_BYTES, -(-size // MAX_PARTS))
        starts = range(0, size, part_bytes)
        lengths = {number: min(part_bytes, size - at) for number, at in enumerate(starts, start=1)}
        upload_id, there = self.resume(where, url, lengths) if resume else (None, {})
        if upload_id is None:
            answer = self.with_retries(
                url,
                lambda: self._client.create_multipart_upload(**where, Metadata=metadata),
            )
            upload_id = str(answer["UploadId"])
        into = {**where, "UploadId": upload_id}

        def part(number: int) -> str:
            start, length = starts[number - 1], lengths[number]
            with _FileSlice(descriptor, start, length, path, self._ends) as body:
                md5 = body.md5()
                if number in there:
                    if there[number] != md5.hex():  # not every server replaces a part
                        raise UploadGoneError
                    self._on_bytes(length)
                    return there[number]
                answer = self.with_retries(
                    url,
                    lambda: self._client.upload_part(
                        **into, PartNumber=number, Body=body.rewound(), ContentMD5=_b64(md5)
                    ),
                )
                self._on_bytes(length)
                return str(answer["ETag"]).strip('"')

        try:
            with ThreadPoolExecutor(PARALLEL, thread_name_prefix="part") as pool:
                running = [pool.submit(part, number) for number in lengths]
                try:
                    etags = [each.result() for each in running]
                except BaseException:  # uploaded parts stay, for the next attempt to resume
                    self._failed.set()
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
            check()
            parts = [
                {"PartNumber": number, "ETag": f'"{etag}"'}
                for number, etag in enumerate(etags, start=1)
            ]
            with translate_s3_errors(self._endpoint_url, url):
                self._client.complete_multipart_upload(**into, MultipartUpload={"Parts": parts})
        except SourceMissing as error:  # another process ended or aborted this upload
            raise UploadGoneError from error
        except UploadGoneError:
            abort_upload(self._client, self._endpoint_url, where["Bucket"], into)
            raise
        except PermanentError as error:
            if not str(error.got).startswith("InvalidPart"):
                raise
            abort_upload(self._client, self._endpoint_url, where["Bucket"], into)
            raise UploadGoneError from error  # some servers answer so for an upload that has ended
        return sum(lengths[number] for number in there)

    def resume(
        self, where: dict[str, str], url: str, lengths: dict[int, int]
    ) -> tuple[str | None, dict[int, str]]:
        """Return the newest unfinished upload with the same part sizes, and its parts' ETags."""
        bucket, key = where["Bucket"], where["Key"]
        for upload in unfinished_uploads(self._client, self._endpoint_url, bucket, key):
            if upload["Key"] != key:
                continue
            into = {**where, "UploadId": upload["UploadId"]}
            try:
                with translate_s3_errors(self._endpoint_url, url):
                    pages = self._client.get_paginator("list_parts").paginate(**into)
                    parts = [each for page in pages for each in page.get("Parts") or ()]
            except SourceMissing:  # ended or aborted since it was listed
                continue
            if all(lengths.get(each["PartNumber"]) == each["Size"] for each in parts):
                return upload["UploadId"], {
                    each["PartNumber"]: str(each["ETag"]).strip('"') for each in parts
                }
        return None, {}

    def with_retries(self, url: str, request: Callable[[], T]) -> T:
        """Return what ``request`` returns, repeated while S3 is busy."""
        patience = RetryBudget()
        while True:
            try:
                with translate_s3_errors(self._endpoint_url, url):
                    return request()
            except ServiceUnavailable as error:
                if self._ends():  # botocore reports Cancelled from a body as this error
                    raise Cancelled("the upload was stopped", where=url) from error
                patience.failed(error)


class PartsUpload:
    """One object of ``size`` bytes, written in parts of ``part_bytes`` by their numbers from 1 on,
    from memory and in any order; parts that an earlier attempt wrote count (``there``).

    What the earlier parts hold is not known: compare the object's digest once it is complete. An
    object of at most one part appears with its ``write``.
    """

    def __init__(
        self, client: Any, endpoint_url: str, url: str, size: int, part_bytes: int
    ) -> None:
        bucket, key = parse_url(url)
        self._client, self._endpoint_url, self._url = client, endpoint_url, url
        self._where = {"Bucket": bucket, "Key": key}
        self._uploader = Uploader(client, endpoint_url, None, lambda _count: None)
        starts = range(0, size, part_bytes)
        self.lengths = {n: min(part_bytes, size - at) for n, at in enumerate(starts, start=1)}
        self._etags: dict[int, str] = {}
        self._id: str | None = None
        if len(self.lengths) > 1:
            self._id, self._etags = self._uploader.resume(self._where, url, self.lengths)

    @property
    def there(self) -> frozenset[int]:
        """Return the numbers of the parts that S3 has."""
        return frozenset(self._etags)

    def begin(self) -> None:
        """Begin the upload, unless an earlier attempt did; call it before ``write``."""
        if self._id is None and len(self.lengths) > 1:
            with translate_s3_errors(self._endpoint_url, self._url):
                answer = self._client.create_multipart_upload(**self._where)
            self._id = str(answer["UploadId"])

    def write(self, number: int, data: bytes | bytearray) -> None:
        """Write part ``number``; threads may write several at once."""
        md5 = _b64(hashlib.md5(data, usedforsecurity=False).digest())
        where: dict[str, Any] = self._where
        if self._id is None:
            put = self._client.put_object
        else:
            where = {**self._where, "UploadId": self._id, "PartNumber": number}
            put = self._client.upload_part
        answer = self._uploader.with_retries(
            self._url, lambda: put(**where, Body=bytes(data), ContentMD5=md5)
        )
        self._etags[number] = str(answer["ETag"]).strip('"')

    def complete(self) -> None:
        """Make the object visible, once every part is written."""
        if self._id is None:
            return
        parts = [{"PartNumber": n, "ETag": f'"{self._etags[n]}"'} for n in self.lengths]
        with translate_s3_errors(self._endpoint_url, self._url):
            self._client.complete_multipart_upload(
                **self._where, UploadId=self._id, MultipartUpload={"Parts": parts}
            )


def unfinished_uploads(
    client: Any, endpoint_url: str, bucket: str, prefix: str
) -> list[dict[str, Any]]:
    """Return the multipart uploads below ``prefix`` that were begun and not ended, newest first, as
    S3 lists them.
    """
    try:
        with translate_s3_errors(endpoint_url, f"s3://{bucket}/{prefix}"):
            pages = client.get_paginator("list_multipart_uploads").paginate(
                Bucket=bucket, Prefix=prefix
            )
            found = [each for page in pages for each in page.get("Uploads") or ()]
    except SourceMissing:  # rclone answers so where there are none
        return []
    return sorted(found, key=lambda upload: upload["Initiated"], reverse=True)


def abort_upload(client: Any, endpoint_url: str, bucket: str, upload: dict[str, Any]) -> None:
    """Abort an unfinished upload and delete its parts; a missing one is no error."""
    with (
        contextlib.suppress(SourceMissing),
        translate_s3_errors(endpoint_url, f"s3://{bucket}/{upload['Key']}"),
    ):
        client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])


class _FileSlice(io.RawIOBase):
    """Part of an open file as a request body; at most a block of it in memory."""

    def __init__(
        self, descriptor: int, offset: int, length: int, path: Path, ends: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._ends = ends
        self._descriptor, self._offset, self._length = descriptor, offset, length
        self._path = path
        self._at = 0

    def __len__(self) -> int:
        return self._length

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        if not view:
            return 0
        if self._ends():
            raise Cancelled("the upload was stopped", where=self._path)
        got = os.preadv(self._descriptor, [view], self._offset + self._at)
        if not got:
            raise SourceChanged(
                "file became shorter while it was uploaded",
                got=f"{self._offset + self._at} bytes",
                wanted=f"{self._offset + self._length} bytes",
                where=self._path,
                do="Publish when nothing writes to the directory.",
            )
        self._at += got
        return got

    def md5(self) -> bytes:
        """Return the MD5 that S3 compares a body with; not trusted as a digest."""
        digest = hashlib.md5(usedforsecurity=False)
        buffer = memoryview(bytearray(min(BLOCK, max(1, self._length))))
        self.seek(0)
        while got := self.readinto(buffer):
            digest.update(buffer[:got])
        return digest.digest()

    def rewound(self) -> _FileSlice:
        """Return this body at its beginning, for another attempt."""
        self.seek(0)
        return self


def _b64(md5: bytes) -> str:
    return base64.b64encode(md5).decode()
