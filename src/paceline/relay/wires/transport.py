"""The contract of a transport: a server that sends verified pieces, streams that pull them.

Several implementations, one conformance suite (tests/relay/test_conformance.py). A transport knows
no lanes, plans or sessions; it reports what happened as the session's events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from paceline.relay.disk.staging import Staging
from paceline.relay.session.extents import Extent
from paceline.relay.wires.barred import Barred
from paceline.relay.wires.pacing import Pacer
from paceline.relay.wires.pull import Pull

Find = Callable[[str, float], Staging | None]  # (digest, wait_s): the open model, or None yet
Rotten = Callable[[str, int], None]  # (digest, piece): a piece of ours rotted on this disk


class Server(Protocol):
    """Serves what ``find`` returns, until it is stopped."""

    @property
    def address(self) -> str:
        """Return ``host:port`` as peers reach it."""
        ...

    def start(self) -> None:
        """Begin to accept streams."""
        ...

    def stop(self) -> None:
        """Close the port and every stream."""
        ...


class PullStream(Protocol):
    """One attempt to pull from one source; what happens is reported, late news included."""

    def request(self, extent: Extent) -> None:
        """Ask for pieces; never blocks for long."""
        ...

    def close(self) -> None:
        """End the stream; returns at once."""
        ...


class Transport(Protocol):
    """How pieces travel between workers."""

    @property
    def name(self) -> str:
        """Return what profiles call it."""
        ...

    @property
    def barred(self) -> Barred:
        """Return whom its servers serve no more; may be changed while they run."""
        ...

    def serve(
        self,
        *,
        host: str,
        port: int,
        worker_id: str,
        find: Find,
        pacer: Pacer,
        on_rotten: Rotten,
    ) -> Server:
        """Bind a port and return its server, not yet started; raises PortInUse or InvalidInput."""
        ...

    def pull(self, pull: Pull) -> PullStream:
        """Open a stream from a worker and return it at once."""
        ...

    def reload(self) -> bool:
        """Use the credentials' files as they are now, for what is opened from now on.

        Returns whether that is so for the server too; raises InvalidInput where they are not good.
        """
        ...
