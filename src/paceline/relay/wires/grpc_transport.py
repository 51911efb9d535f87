"""The gRPC transport: ``grpc_server`` and ``grpc_client`` behind the contract of ``transport``."""

from __future__ import annotations

from paceline.relay.wires.barred import Barred
from paceline.relay.wires.grpc_client import GrpcStream
from paceline.relay.wires.grpc_server import GrpcServer
from paceline.relay.wires.pacing import Pacer
from paceline.relay.wires.pull import Pull
from paceline.relay.wires.tls import TlsSettings
from paceline.relay.wires.transport import Find, Rotten


class GrpcTransport:
    """``ChunkTransfer`` streams, plain or by mutual TLS; both sides prove that they know ``token``.

    Raises InvalidInput where the credentials cannot be used.
    """

    def __init__(self, token: str, tls: TlsSettings | None = None) -> None:
        self._token = token
        self.barred = Barred()
        self._tls = tls
        if tls is not None:
            tls.context(server=True)  # gRPC would say only that something is wrong, and later

    @property
    def name(self) -> str:
        """Return what profiles call it."""
        return "grpc"

    def serve(
        self,
        *,
        host: str,
        port: int,
        worker_id: str,
        find: Find,
        pacer: Pacer,
        on_rotten: Rotten,
    ) -> GrpcServer:
        """Bind a port; see Transport."""
        return GrpcServer(
            host=host,
            port=port,
            worker_id=worker_id,
            token=self._token,
            find=find,
            pacer=pacer,
            on_rotten=on_rotten,
            tls=self._tls,
            barred=self.barred,
        )

    def pull(self, pull: Pull) -> GrpcStream:
        """Open a stream; see Transport."""
        return GrpcStream(pull, self._token, self._tls)

    def reload(self) -> bool:
        """Use the credentials' files as they are now; see Transport."""
        if self._tls is None:
            return True
        self._tls.context(server=True)
        return False  # each stream reads them; the server keeps those it began with
