"""Preemption notices: detect that a cloud provider is about to reclaim this machine.

A ``PreemptionWatcher`` runs in its own process on each node; it returns from ``wait`` when there
is a notice. (SIGTERM is handled elsewhere.) ``MetadataWatcher`` fits the large clouds: it polls
the machine's metadata service, which answers 404 (or FALSE) until a notice exists. Does not depend
on ranks or checkpoints.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Protocol

from paceline.errors import InvalidInput, ServiceUnavailable
from paceline.system import Endpoint, fetch
from paceline.training.user_code import CodeRef, call, parse, require_allowed

log = logging.getLogger(__name__)

SETTING = "training.guard.preemption"
POLL_S = 2.0
TIMEOUT_S = 2.0
MAX_ANSWER_BYTES = 64 * 1024
HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}  # each cloud ignores unknown headers
_NOT_YET = {"", "FALSE", "NONE"}


class PreemptionWatcher(Protocol):
    """Detects that this machine is about to be reclaimed."""

    def wait(self) -> None:
        """Block until there is a notice."""


class MetadataWatcher:
    """Polls ``url``; any answer other than 404, empty, FALSE or NONE is a notice.

    No answer is not a notice: metadata services have short outages.
    """

    def __init__(self, url: str, poll_s: float = POLL_S) -> None:
        try:
            Endpoint.of(url)
        except InvalidInput as error:
            raise InvalidInput(
                "bad metadata URL", got=url, wanted="http://… or https://…"
            ) from error
        self.url = url
        self.poll_s = poll_s

    def wait(self) -> None:
        """Block until the service reports a notice."""
        warned = False
        while True:
            try:
                if self.noticed():
                    return
                warned = False
            except ServiceUnavailable as error:
                if not warned:
                    log.warning("metadata service does not answer url=%s why=%s", self.url, error)
                warned = True
            time.sleep(self.poll_s)

    def noticed(self) -> bool:
        """Return whether the service reports a notice now; raises ServiceUnavailable."""
        answer = fetch(
            self.url,
            name="the metadata service",
            headers=HEADERS,
            timeout_s=TIMEOUT_S,
            max_bytes=MAX_ANSWER_BYTES,
        )
        if answer.status == HTTPStatus.NOT_FOUND:
            return False
        if answer.status != HTTPStatus.OK:  # also a redirect: the service is local to the machine
            raise ServiceUnavailable("no notice can be read", got=f"HTTP {answer.status}")
        return answer.body.decode(errors="replace").strip().upper() not in _NOT_YET


def is_metadata_url(named: str) -> bool:
    """Return whether ``named`` is a URL to poll; otherwise it is a code reference."""
    return "://" in named and not named.startswith(("file://", "git+"))


def require_allowed_watcher(named: str, sources: Sequence[str]) -> CodeRef | None:
    """Return ``named`` as a code reference, None for a metadata URL; imports no user code.

    Raises InvalidInput where it is neither or not pinned, AccessDenied where it is outside
    ``sources``.
    """
    if is_metadata_url(named):
        MetadataWatcher(named)
        return None
    ref = parse(named, SETTING)
    require_allowed(ref, sources)
    return ref


def open_watcher(named: str, sources: Sequence[str], cache: Path) -> PreemptionWatcher:
    """Return the watcher for ``named``: a metadata URL, or a code reference that returns a watcher.

    A reference must be pinned and from one of ``sources``; it is fetched into ``cache`` and called
    without ambient credentials, like ``training.code_ref``. Raises what ``user_code.load`` does.
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
    found: PreemptionWatcher = watcher
    return found
