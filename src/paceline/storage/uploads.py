"""Uploads one object, in parts where it is large; resumes what an earlier attempt left.

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
from collections.abc import Callable, Iterator
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

T = TypeVar("T")
Body = io.RawIOBase | io.BytesIO


class UploadGoneError(Exception):
    """An unfinished upload cannot be completed: it has other bytes, or it ended meanwhile."""


class PartsUpload:
    """One object of ``size`` bytes, written in parts of ``part_bytes`` by their numbers from 1 on,
    in any order and by several threads; with ``resume``, parts that an earlier attempt wrote count
    (``there``: their ETags). An object of at most one part appears with its ``write``.

    What the earlier parts hold is not known: compare their MD5, or the object's digest once it is
    complete. Once ``ends()`` is true a request that fails raises Cancelled.
    """

    def __init__(
        self,
        client: Any,
        endpoint_url: str,
        url: str,
        size: int,
        part_bytes: int,
        *,
        metadata: dict[str, str] | None = None,
        resume: bool = True,
        ends: Callable[[], bool] = lambda: False,
    ) -> None:
        bucket, key = parse_url(url)
        self._client, self._endpoint_url, self._url = client, endpoint_url, url
        self._into = {"Bucket": bucket, "Key": key}  # with an UploadId once it has begun
        self._metadata, self._ends = metadata or {}, ends
        starts = range(0, size, part_bytes)
        self.lengths = {n: min(part_bytes, size - at) for n, at in enumerate(starts, start=1)}
        self.there: dict[int, str] = {}
        self.in_parts = len(self.lengths) > 1
        if resume and self.in_parts:
            self._resume()

    def begin(self) -> None:
        """Begin the upload, unless an earlier attempt did; call it before ``write``."""
        if self.in_parts and "UploadId" not in self._into:
            create = self._client.create_multipart_upload
            answer = self._with_retries(lambda: create(**self._into, Metadata=self._metadata))
            self._into["UploadId"] = str(answer["UploadId"])

    def write(self, number: int, body: Body, md5: bytes | None = None) -> None:
        """Write part ``number`` from ``body``, whose MD5 is taken unless given."""
        sent: dict[str, Any] = {**self._into, "Body": body}
        sent["ContentMD5"] = base64.b64encode(md5 or md5_of(body)).decode()
        sent |= {"PartNumber": number} if self.in_parts else {"Metadata": self._metadata}
        put = self._client.upload_part if self.in_parts else self._client.put_object

        def attempt() -> Any:
            body.seek(0)
            return put(**sent)

        self.there[number] = str(self._with_retries(attempt)["ETag"]).strip('"')

    def complete(self) -> None:
        """Make the object visible, once every part is written."""
        if not self.in_parts:
            return
        parts = [{"PartNumber": n, "ETag": f'"{self.there[n]}"'} for n in self.lengths]
        with translate_s3_errors(self._endpoint_url, self._url):
            self._client.complete_multipart_upload(**self._into, MultipartUpload={"Parts": parts})

    def abort(self) -> None:
        abort_upload(self._client, self._endpoint_url, self._into)

    def _resume(self) -> None:
        """Go on with the newest unfinished upload that has the same part sizes."""
        bucket, key = self._into["Bucket"], self._into["Key"]
        for upload in unfinished_uploads(self._client, self._endpoint_url, bucket, key):
            if upload["Key"] != key:
                continue
            into = {**self._into, "UploadId": upload["UploadId"]}
            try:
                with translate_s3_errors(self._endpoint_url, self._url):
                    pages = self._client.get_paginator("list_parts").paginate(**into)
                    parts = [each for page in pages for each in page.get("Parts") or ()]
            except SourceMissing:  # ended or aborted since it was listed
                continue
            if all(self.lengths.get(each["PartNumber"]) == each["Size"] for each in parts):
                self._into = into
                self.there = {each["PartNumber"]: str(each["ETag"]).strip('"') for each in parts}
                return

    def _with_retries(self, request: Callable[[], T]) -> T:
        """Return what ``request`` returns, repeated while S3 is busy."""
        patience = RetryBudget()
        while True:
            try:
                with translate_s3_errors(self._endpoint_url, self._url):
                    return request()
            except ServiceUnavailable as error:
                if self._ends():  # botocore reports Cancelled from a body as this error
                    raise Cancelled("the upload was stopped", where=self._url) from error
                patience.failed(error)


@contextlib.contextmanager
def _upload_gone(upload: PartsUpload) -> Iterator[None]:
    """Raise UploadGoneError for what servers answer of an upload that ended meanwhile."""
    try:
        yield
    except SourceMissing as error:
        if not upload.in_parts:
            raise
        raise UploadGoneError from error  # another process ended or aborted this upload
    except UploadGoneError:
        upload.abort()
        raise
    except PermanentError as error:
        if not str(error.got).startswith("InvalidPart"):
            raise
        upload.abort()
        raise UploadGoneError from error  # some servers answer so for an upload that has ended


def send_file(
    client: Any,
    endpoint_url: str,
    path: Path,
    url: str,
    sha256: str,
    *,
    resume: bool,
    stopping: threading.Event | None,
    on_bytes: Callable[[int], None],
    check: Callable[[], None],
) -> int:
    """Write the file as one object and return how many bytes of it were there already; with
    ``resume`` the parts of an unfinished upload count.

    ``stopping``, once set, ends it by Cancelled; its parts stay in S3. ``on_bytes`` is called with
    the bytes that S3 has received. ``check`` is called when all of it was read and before the
    object appears; it may raise. Raises UploadGoneError where the next attempt has to begin anew.
    """
    failed = threading.Event()  # of this file only: the other files continue

    def ends() -> bool:
        return failed.is_set() or (stopping is not None and stopping.is_set())

    metadata = {DIGEST_KEY: sha256} if sha256 else {}
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        large = size > 2 * PART_BYTES
        part_bytes = max(PART_BYTES, -(-size // MAX_PARTS)) if large else max(1, size)
        upload = PartsUpload(
            client,
            endpoint_url,
            url,
            size,
            part_bytes,
            metadata=metadata,
            resume=resume,
            ends=ends,
        )
        found = dict(upload.there)
        upload.begin()

        def part(number: int) -> None:
            length = upload.lengths.get(number, 0)
            body = _FileSlice(file.fileno(), (number - 1) * part_bytes, length, path, ends)
            md5 = md5_of(body)
            if found.get(number, md5.hex()) != md5.hex():  # not every server replaces a part
                raise UploadGoneError
            if not upload.in_parts:
                check()  # a later change fails the Content-MD5
            if number not in found:
                upload.write(number, body, md5)
            on_bytes(length)

        with _upload_gone(upload):
            with ThreadPoolExecutor(PARALLEL, thread_name_prefix="part") as pool:
                running = [pool.submit(part, number) for number in upload.lengths or (1,)]
                try:
                    for each in running:
                        each.result()
                except BaseException:  # uploaded parts stay, for the next attempt to resume
                    failed.set()
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
            if upload.in_parts:
                check()
            upload.complete()
        return sum(upload.lengths[number] for number in found)


def unfinished_uploads(
    client: Any, endpoint_url: str, bucket: str, prefix: str
) -> list[dict[str, Any]]:
    """Return S3's records of the multipart uploads below ``prefix`` that go on, newest first."""
    try:
        with translate_s3_errors(endpoint_url, f"s3://{bucket}/{prefix}"):
            pages = client.get_paginator("list_multipart_uploads").paginate(
                Bucket=bucket, Prefix=prefix
            )
            found = [each for page in pages for each in page.get("Uploads") or ()]
    except SourceMissing:  # rclone answers so where there are none
        return []
    return sorted(found, key=lambda upload: upload["Initiated"], reverse=True)


def abort_upload(client: Any, endpoint_url: str, upload: dict[str, str]) -> None:
    """Abort ``upload`` (Bucket, Key, UploadId) with its parts; a missing one is no error."""
    url = f"s3://{upload['Bucket']}/{upload['Key']}"
    with contextlib.suppress(SourceMissing), translate_s3_errors(endpoint_url, url):
        client.abort_multipart_upload(**upload)


def md5_of(body: Body) -> bytes:
    """Return the MD5 that S3 compares a body with; not trusted as a digest."""
    body.seek(0)
    return hashlib.file_digest(body, lambda: hashlib.md5(usedforsecurity=False)).digest()


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
