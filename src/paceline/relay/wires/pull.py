"""One attempt to pull: who asks whom, where the pieces go, and who hears of what happens."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.errors import PacelineError, PeerLost, StorageFailed, StorageFull
from paceline.relay.disk.staging import Staging
from paceline.relay.session.events import LocalFailed, SessionEvent, SourceFailed
from paceline.relay.wires.counters import Counters
from paceline.relay.wires.frames import NONCE_BYTES, PROTOCOL_VERSION, Hello
from paceline.relay.wires.pacing import Pacer
from paceline.relay.wires.portion import Rate, no_limit
from paceline.wire.plan import Source

log = logging.getLogger(__name__)

Report = Callable[[SessionEvent], None]


@dataclass(frozen=True, kw_only=True)
class Pull:
    """What every transport needs to know of a stream; ``stream`` is its number in its session."""

    source: Source
    stream: int
    worker_id: str  # who asks
    staging: Staging
    pacer: Pacer
    counters: Counters
    keepalive_s: float  # how often the source says that it waits
    report: Report
    portion: Rate = no_limit  # of this worker's link

    @property
    def key(self) -> str:
        """Return what identifies the source."""
        return self.source.key

    def hello(self) -> Hello:
        """Return how this side introduces itself, with a nonce of its own."""
        return Hello(
            PROTOCOL_VERSION,
            self.keepalive_s,
            self.staging.manifest.digest,
            secrets.token_bytes(NONCE_BYTES),
            self.worker_id,
        )

    def start(self, target: Callable[[], None]) -> threading.Thread:
        """Return the stream's receiving thread, begun."""
        thread = threading.Thread(target=target, name=f"pull-{self.key[:20]}", daemon=True)
        thread.start()
        return thread

    @contextmanager
    def receiving(self, is_closed: Callable[[], bool]) -> Iterator[None]:
        """Keep the model open, and report what ends the stream, unless we closed it ourselves.

        What our own disk refuses is told of in any case: it is no fault of the source. So is a
        defect of ours: a stream that ended without a word would be waited for.
        """
        try:
            with self.staging.using():
                yield
        except (StorageFull, StorageFailed) as error:
            self.report(LocalFailed(error))
        except PacelineError as error:
            if not is_closed():
                self.report(SourceFailed(self.key, self.stream, error))
        except OSError as error:
            if not is_closed():
                got = error.strerror or error
                lost = PeerLost("the connection broke", got=got, where=self.key)
                self.report(SourceFailed(self.key, self.stream, lost))
        except Exception as error:
            log.exception("the stream from %s broke", self.key)
            lost = PeerLost("the stream broke", got=repr(error), where=self.key)
            self.report(SourceFailed(self.key, self.stream, lost))
