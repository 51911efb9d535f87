"""Notices that a machine is about to be taken away, from whoever gives them.

SIGTERM needs nothing of this. A cloud's notice does: a ``Watcher`` waits for it, in a process of
its own on each node, and its return is the notice. ``MetadataWatcher`` is the example that fits the
large clouds: it polls an endpoint of the machine's metadata service, which answers 404 (or FALSE)
until the machine is to go. Knows nothing of ranks or checkpoints.
"""

from __future__ import annotations

import http.client
import logging
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from paceline.errors import InvalidInput
from paceline.training.user_code import CodeRef, call, parse, require_allowed

log = logging.getLogger(__name__)

DIAL = "training.guard.preemption"
POLL_S = 2.0
TIMEOUT_S = 2.0
MAX_ANSWER_BYTES = 64 * 1024
HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}  # each cloud ignores the others'
_NOT_YET = {"", "FALSE", "NONE"}


class Watcher(Protocol):
    """Something that knows when this machine has to go."""

    def wait(self) -> None:
        """Return once there is a notice; never before."""


class MetadataWatcher:
    """Polls ``url``; an answer other than 404, empty or FALSE is the notice.

    A service that does not answer is no notice: metadata services have short breaks of their own.
    """

    def __init__(self, url: str, poll_s: float = POLL_S) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise InvalidInput("bad metadata URL", got=url, wanted="http://… or https://…")
        self.url = url
        self.poll_s = poll_s
        # No proxy: the address is the machine's own, and no redirect leads elsewhere.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())

    def wait(self) -> None:
        """Return once the service tells of the machine's end."""
        told = False
        while True:
            try:
                if self.noticed():
                    return
                told = False
            except (OSError, http.client.HTTPException) as error:
                if not told:
                    log.warning("metadata service does not answer url=%s why=%s", self.url, error)
                told = True
            time.sleep(self.poll_s)

    def noticed(self) -> bool:
        """Return whether the service says now that the machine goes; raises OSError."""
        request = urllib.request.Request(self.url, headers=HEADERS)  # noqa: S310 - http(s), above
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                body = answer.read(MAX_ANSWER_BYTES)
        except urllib.error.HTTPError as error:
            if error.code == http.client.NOT_FOUND:
                return False
            raise
        return body.decode(errors="replace").strip().upper() not in _NOT_YET


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


def require_allowed_watcher(named: str, sources: Sequence[str]) -> CodeRef | None:
    """Return the code reference that ``named`` is, None for a URL; nothing is imported.

    Raises InvalidInput where it is neither, or not pinned, AccessDenied where it is from none of
    ``sources``.
    """
    if "://" in named and not named.startswith(("file://", "git+")):
        MetadataWatcher(named)
        return None
    ref = parse(named, DIAL)
    require_allowed(ref, sources)
    return ref


def open_watcher(named: str, sources: Sequence[str], cache: Path) -> Watcher:
    """Return the watcher that ``named`` names: a URL, or a code reference that returns one.

    A reference is pinned, from one of ``sources``, fetched into ``cache``, and called without
    ambient credentials, as ``training.code_ref`` is. Raises what ``code_ref.load`` does.
    """
    ref = require_allowed_watcher(named, sources)
    if ref is None:
        return MetadataWatcher(named)
    watcher = call(ref, sources, cache)
    if not callable(getattr(watcher, "wait", None)):
        raise InvalidInput(
            "code reference returned no preemption watcher",
            got=type(watcher).__name__,
            wanted="an object with wait()",
            where=ref.where,
        )
    found: Watcher = watcher
    return found
