"""The framed TCP transport: ``server`` and ``client`` behind the contract of ``transport``."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.relay.client import PeerStream
from paceline.relay.counters import Counters
from paceline.relay.pacing import Pacer
from paceline.relay.server import PeerServer
from paceline.relay.staging import Staging
from paceline.relay.transport import Find, Report, Rotten
from paceline.wire.plan import Source


@dataclass(frozen=True, slots=True)
class TcpTransport:
    """Frames over TCP; both sides prove that they know ``token``."""

    token: str
    name: str = "tcp"

    def serve(
        self,
        *,
        host: str,
        port: int,
        worker_id: str,
        find: Find,
        pacer: Pacer,
        on_rotten: Rotten,
    ) -> PeerServer:
        """Bind a port; see Transport."""
        return PeerServer(
            host=host,
            port=port,
            worker_id=worker_id,
            token=self.token,
            find=find,
            pacer=pacer,
            on_rotten=on_rotten,
        )

    def pull(
        self,
        *,
        source: Source,
        stream: int,
        worker_id: str,
        staging: Staging,
        pacer: Pacer,
        counters: Counters,
        keepalive_s: float,
        report: Report,
    ) -> PeerStream:
        """Open a stream; see Transport."""
        return PeerStream(
            source=source,
            stream=stream,
            worker_id=worker_id,
            token=self.token,
            staging=staging,
            pacer=pacer,
            counters=counters,
            keepalive_s=keepalive_s,
            report=report,
        )
