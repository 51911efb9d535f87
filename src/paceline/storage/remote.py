"""Ranged reads of models that others host: files by HTTP, with an explicit policy for redirects.

A redirect is followed only to the server itself or to a host that the profile names, and the user's
token is sent to the server itself only. ``hub`` and ``oci`` say which files a model has.
"""

from __future__ import annotations

import fnmatch
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

import urllib3
from pydantic import BaseModel, ValidationError
from urllib3.exceptions import HTTPError

from paceline.config import RemoteAccess
from paceline.errors import (
    AccessDenied,
    Cancelled,
    CorruptData,
    InvalidInput,
    PermanentError,
    ServiceUnavailable,
    SourceMissing,
)
from paceline.storage.client import RetryBudget

TIMEOUT = urllib3.Timeout(connect=5.0, read=20.0)
MAX_REDIRECTS = 5
MAX_DOCUMENT_BYTES = 64 * 1024 * 1024
CONNECTIONS = 16
STEP = 256 * 1024
_REDIRECTS = (301, 302, 303, 307, 308)
_EXPIRED = (401, 403, 404, 410)  # of an address with a signature that ended
Document = TypeVar("Document", bound=BaseModel)
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file: ``url`` serves ranges of it; at most one of the digests is empty."""

    path: str
    size: int
    url: str
    sha256: str = ""
    git_sha1: str = ""  # of git's blob: a header, then the bytes


@dataclass(frozen=True)
class RemoteModel:
    """A model at one immutable revision, and how to read it."""

    url: str  # with the revision
    model_id: str
    version: str
    files: tuple[RemoteFile, ...]
    reader: RemoteReader

    @property
    def total_size(self) -> int:
        return sum(file.size for file in self.files)


class RemoteReader:
    """HTTP to one server with one user's credentials; threads share it."""

    def __init__(self, access: RemoteAccess, name: str) -> None:
        """``name`` is what errors call the server, such as "the hub"."""
        self._access, self._name = access, name
        parts = urlsplit(access.endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidInput(
                f"not the address of {name}", got=access.endpoint, wanted="https://host[:port]"
            )
        self._origin = (parts.scheme, parts.netloc)
        self._credentials = f"Bearer {access.token}" if access.token else ""
        kept: dict[str, Any] = {"maxsize": CONNECTIONS, "timeout": TIMEOUT, "retries": False}
        self._pool = (
            urllib3.ProxyManager(access.proxy, **kept)
            if access.proxy
            else urllib3.PoolManager(**kept)
        )
        self._lock = threading.Lock()
        self._moved: dict[str, str] = {}  # by URL: where its bytes are, until that expires

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> bytes:
        """Return the small document at ``path``; waits out a server that is busy."""
        url = f"{self._access.endpoint}{path}"

        def read() -> bytes:
            with self.opened(url, headers) as response:
                return response.read(MAX_DOCUMENT_BYTES + 1)

        raw = RetryBudget().repeat(read)
        if len(raw) > MAX_DOCUMENT_BYTES:
            got, wanted = f"more than {MAX_DOCUMENT_BYTES} bytes", "a listing of files"
            raise PermanentError("an answer is too large", got=got, wanted=wanted, where=url)
        return raw

    def parse(self, kind: type[Document], raw: bytes, where: str) -> Document:
        """Return the JSON document in ``raw``; raises PermanentError for another one."""
        try:
            return kind.model_validate_json(raw)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            raise PermanentError(
                f"{self._name} sent an answer that cannot be read",
                got=repr(first["input"])[:100],
                wanted=f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
                where=f"{self._access.endpoint}{where}",
            ) from error

    def read(
        self, file: RemoteFile, offset: int, length: int, stopping: threading.Event
    ) -> bytearray:
        """Return ``length`` bytes of ``file`` from ``offset`` on; one that breaks off is resumed.

        Raises Cancelled soon after ``stopping`` is set.
        """
        data, done, budget = bytearray(length), 0, RetryBudget()
        view = memoryview(data)
        while done < length:
            try:
                for got in self._stream(file, offset + done, view[done:]):
                    done += got
                    budget.progressed()
                    if stopping.is_set():
                        raise Cancelled("the import was stopped", where=file.url)
            except ServiceUnavailable as error:
                if stopping.is_set():
                    raise Cancelled("the import was stopped", where=file.url) from error
                budget.failed(error)
        return data

    def _stream(self, file: RemoteFile, offset: int, view: memoryview) -> Iterator[int]:
        wanted = f"bytes={offset}-{offset + len(view) - 1}"
        with self.opened(file.url, {"Range": wanted, "Accept-Encoding": "identity"}) as response:
            whole = response.status == 200 and offset == 0 and len(view) == file.size
            match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if not whole and (match is None or int(match[1]) != offset):
                raise PermanentError(
                    f"{self._name} ignored the range",
                    got=f"HTTP {response.status}, {response.headers.get('Content-Range')}",
                    wanted=wanted,
                    where=file.url,
                )
            if match is not None and int(match[3]) != file.size:
                raise CorruptData(
                    "a file has another size than its listing",
                    got=f"{match[3]} bytes",
                    wanted=f"{file.size} bytes",
                    where=file.url,
                )
            done = 0
            while done < len(view):
                step = response.read(min(STEP, len(view) - done))
                if not step:
                    raise ServiceUnavailable(
                        f"{self._name} sent a short body", got=f"{done} bytes", where=file.url
                    )
                view[done : done + len(step)] = step
                done += len(step)
                yield len(step)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def opened(
        self, url: str, headers: Mapping[str, str] | None = None
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """Open the answer to a GET that succeeded, redirects followed as the policy allows.

        Raises AccessDenied, SourceMissing, ServiceUnavailable (also while it is read) and
        PermanentError.
        """
        with self._lock:
            at = self._moved.get(url, url)
        try:
            response = self._follow(url, at, dict(headers or {}))
            try:
                yield response
            finally:
                response.close() if response.length_remaining else response.release_conn()
        except (HTTPError, OSError) as error:
            raise ServiceUnavailable(
                f"{self._name} does not answer",
                got=f"{type(error).__name__}: {error}",
                where=_shown(url),
                do="Check the address and the network of this machine.",
            ) from error

    def _follow(self, url: str, at: str, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        for _ in range(MAX_REDIRECTS):
            own = self._credentials and self._is_own(at)
            sent = headers | ({"Authorization": self._credentials} if own else {})
            response: urllib3.BaseHTTPResponse = self._pool.request(
                "GET", at, headers=sent, redirect=False, preload_content=False
            )
            if response.status in _REDIRECTS:
                response.close()
                at = self._allowed(urljoin(at, response.headers.get("Location", "")))
                continue
            if response.status in (200, 206):
                with self._lock:
                    self._moved[url] = at
                return response
            response.close()
            if response.status in _EXPIRED and at != url and url in self._moved:
                with self._lock:
                    del self._moved[url]  # its signature has ended: another one
                at = url
                continue
            if response.status == 401 and self._log_in(response):
                continue
            raise self._refused(response, url)
        raise PermanentError(
            f"{self._name} redirects without end", got=f"{MAX_REDIRECTS} times", where=_shown(url)
        )

    def _log_in(self, response: urllib3.BaseHTTPResponse) -> bool:  # noqa: ARG002
        """Return whether there are new credentials, so that the request is worth a repetition."""
        return False

    def _is_own(self, url: str) -> bool:
        parts = urlsplit(url)
        return (parts.scheme, parts.netloc) == self._origin

    def _allowed(self, url: str) -> str:
        """Return where a redirect leads; raises AccessDenied for a host that is not allowed."""
        # By the parser that connects: urlsplit takes another host from "http://one\@other/".
        parts = urllib3.util.parse_url(url)
        names = {parts.host or "", parts.netloc or ""}
        secure = parts.scheme == "https" or parts.scheme == self._origin[0]
        hosts = self._access.redirect_hosts
        if self._is_own(url) or (
            secure and any(fnmatch.fnmatchcase(name, each) for name in names for each in hosts)
        ):
            return url
        raise AccessDenied(
            f"{self._name} redirects to a host that is not allowed",
            got=f"{parts.scheme}://{parts.netloc}",
            wanted=f"{self._access.endpoint}, {', '.join(hosts) or 'no other'}",
            where=self._access.setting,
            do=f"Add the host to {self._access.setting} if downloads may come from it.",
        )

    def _refused(self, response: urllib3.BaseHTTPResponse, url: str) -> Exception:
        status, where = response.status, _shown(url)
        got = f"HTTP {status} {response.headers.get('X-Error-Message', '')}".strip()[:300]
        if status in (401, 403):
            has = self._credentials or self._access.user
            return AccessDenied(
                f"{self._name} refuses this user" + ("" if has else ", who has no token"),
                got=got,
                where=where,
                do="Check the name; if it is right, log in there on this machine, or accept the "
                "model's terms on its page.",
            )
        if status == 404:
            what, do = f"{self._name} does not have it", "Check name and revision."
            return SourceMissing(what, got=got, where=where, do=do)
        if status == 429 or status >= 500:
            return ServiceUnavailable(f"{self._name} cannot serve now", got=got, where=where)
        return PermanentError(f"{self._name} refused the request", got=got, where=where)


def _shown(url: str) -> str:
    """Return ``url`` without its query, which may have a signature."""
    return url.partition("?")[0]
