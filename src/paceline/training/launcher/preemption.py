"""Preemption notices: detect that a cloud provider is about to reclaim this machine.

A ``MetadataWatcher`` runs in its own process on each node; it polls the machine's metadata service,
which answers 404 (or FALSE) until a notice exists, and returns from ``wait`` then. (SIGTERM is
handled elsewhere.) Does not depend on ranks or checkpoints.
"""

from __future__ import annotations

import logging
import time
from http import HTTPStatus

from paceline.errors import InvalidInput, ServiceUnavailable
from paceline.system import Endpoint, fetch

log = logging.getLogger(__name__)

POLL_S = 2.0
TIMEOUT_S = 2.0
MAX_ANSWER_BYTES = 64 * 1024
HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}  # each cloud ignores unknown headers
_NOT_YET = {"", "FALSE", "NONE"}


class MetadataWatcher:
    """Polls ``url``; any answer other than 404, empty, FALSE or NONE is a notice.

    No answer is not a notice: metadata services have short outages.
    """

    def __init__(self, url: str, poll_s: float = POLL_S) -> None:
        try:
            Endpoint.of(url)
        except InvalidInput as error:
            raise InvalidInput(
                "bad metadata URL",
                got=url,
                wanted="http://… or https://…",
                where="training.guard.preemption",
                do="A notice of another kind: send SIGTERM to the node's launcher or agent.",
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
