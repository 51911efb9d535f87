"""Notices that a machine is about to be taken away, from whoever gives them.

SIGTERM needs nothing of this. A cloud's notice does: a ``Watcher`` waits for it, in a process of
its own on each node, and its return is the notice. ``MetadataWatcher`` is the example that fits the
large clouds: it polls an endpoint of the machine's metadata service, which answers 404 (or FALSE)
until the machine is to go. Knows nothing of ranks or checkpoints.
"""

from __future__ import annotations

import http.client
import importlib
import logging
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Protocol

from paceline.errors import InvalidInput

log = logging.getLogger(__name__)

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


def open_watcher(named: str) -> Watcher:
    """Return the watcher that ``named`` names: a URL, or ``module:function`` that returns one.

    Raises InvalidInput where there is none of that name.
    """
    if named.startswith(("http://", "https://")):
        return MetadataWatcher(named)
    module, colon, function = named.partition(":")
    try:
        if not colon:
            raise ValueError("no colon")
        watcher = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput(
            "no such preemption watcher",
            got=f"{named!r} ({error})",
            wanted="http(s)://… or module:function",
            do="Correct training.guard.preemption in the profile.",
        ) from error
    found: Watcher = watcher
    return found
