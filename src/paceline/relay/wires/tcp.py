"""The framed TCP transport: ``server`` and ``client`` behind the contract of ``transport``."""

from __future__ import annotations

from paceline.relay.wires.barred import Barred
from paceline.relay.wires.client import PeerStream
from paceline.relay.wires.pacing import Pacer
from paceline.relay.wires.pull import Pull
from paceline.relay.wires.server import PeerServer
from paceline.relay.wires.tls import TlsSettings
from paceline.relay.wires.transport import Find, Rotten


class TcpTransport:
    """Frames over TCP, or over mutual TLS 1.3; both sides prove that they know ``token``.

    Raises InvalidInput where the credentials cannot be used.
    """

    def __init__(self, token: str, tls: TlsSettings | None = None) -> None:
        self._token = token
        self.barred = Barred()
        self._tls = tls
        self._server_tls = tls.context(server=True) if tls else None
        self._client_tls = tls.context(server=False) if tls else None

    @property
    def name(self) -> str:
        """Return what profiles call it."""
        return "tcp"

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
            token=self._token,
            find=find,
            pacer=pacer,
            on_rotten=on_rotten,
            tls=self._server_tls,
            barred=self.barred,
        )

    def pull(self, pull: Pull) -> PeerStream:
        """Open a stream; see Transport."""
        return PeerStream(pull, self._token, self._client_tls)

    def reload(self) -> bool:
        """Use the credentials' files as they are now; see Transport."""
        if self._tls is not None and self._server_tls is not None:
            self._client_tls = self._tls.context(server=False)  # checks them
            self._server_tls.load_cert_chain(self._tls.cert, self._tls.key)
        return True
