"""Creates the transport that a profile configures (TCP or gRPC), with TLS credentials and token.

Plain connections are allowed on loopback only, unless the profile explicitly sets
``peer_tls = "plaintext-anywhere"``. It opens no ports.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.config import Runtime
from paceline.errors import InvalidInput, InvalidProfile
from paceline.relay.transport.contract import Transport
from paceline.relay.transport.tcp_server import TcpTransport
from paceline.relay.transport.tls import TlsSettings, peer_ids
from paceline.system import is_loopback

_ROUNDS = 4  # a handshake of TLS 1.3 takes two


def check_own_certificate(tls: TlsSettings, worker_id: str) -> None:
    """Check that peers of the same authority will accept ``tls`` as ``worker_id``.

    Raises InvalidInput with the reason otherwise. Without this check a worker whose certificate is
    another worker's, of another authority or expired would start, register and be planned in, and
    then be refused by every peer.
    """
    shown = _certificate_as_peers_see_it(tls)
    names = [value for kind, value in shown.get("subjectAltName", ()) if kind == "URI"]
    if peer_ids(names) != [worker_id]:
        raise InvalidInput(
            "this is another worker's certificate",
            got=", ".join(peer_ids(names)) or "one that names no worker",
            wanted=worker_id,
            where=tls.cert,
            do="Start the agent as that worker, or issue this one an identity of its own.",
        )


def _certificate_as_peers_see_it(tls: TlsSettings) -> dict[str, Any]:
    """Return the certificate as a peer reads it, from a TLS handshake in memory.

    The contexts are those of real connections.
    """
    server, client = tls.context(server=True), tls.context(server=False)
    server.verify_mode = ssl.CERT_NONE  # one side has to verify; both use the same files
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    showing = server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for _ in range(_ROUNDS):
            with suppress(ssl.SSLWantReadError):
                asking.do_handshake()
                return dict(asking.getpeercert() or {})
            with suppress(ssl.SSLWantReadError):
                showing.do_handshake()
    except ssl.SSLError as error:
        raise InvalidInput(
            "peers would refuse this worker's certificate",
            got=getattr(error, "verify_message", "") or error.reason or error,
            wanted=f"one of the authority in {tls.ca.name} that is valid now",
            where=tls.cert,
            do="Issue this worker an identity of this cluster's authority.",
        ) from error
    raise AssertionError("a handshake in memory takes two rounds")


_FILES = ("peer_ca", "peer_cert", "peer_key")


def transport_for(runtime: Runtime, listen_host: str, worker_id: str) -> Transport:
    """Return the transport of ``worker_id``, which will listen on ``listen_host``.

    Raises InvalidProfile if the port would be unprotected, InvalidInput if the credential files are
    not usable or peers would not accept them from this worker.
    """
    tls = tls_for(runtime, worker_id)
    if tls is not None:
        check_own_certificate(tls, worker_id)
    allowed = runtime.profile.security.peer_tls == "plaintext-anywhere"
    if tls is None and not allowed and not is_loopback(listen_host):
        raise InvalidProfile(
            "workers may not listen beyond loopback without mutual TLS",
            got=f"peer port on {listen_host}, [security] peer_tls = "
            f'"{runtime.profile.security.peer_tls}" without its files',
            wanted="peer_ca, peer_cert and peer_key in [security]",
            where=f"profile {runtime.profile.name}",
            do="Issue each worker an identity and name the files; or, where every user of that "
            'network may read the models, set [security] peer_tls = "plaintext-anywhere".',
        )
    token = runtime.secrets.peers_token
    if not token and not is_loopback(listen_host):
        raise InvalidProfile(
            "workers have no token to greet each other with",
            got=f"peer port on {listen_host}, an empty token: any caller would pass",
            wanted="the peer token of the cluster",
            where=f"{runtime.state_dir}/runtime.json",
            do="Join the node with a token (`paceline tokens join`), or start the installation.",
        )
    if runtime.profile.relay.transport == "grpc":
        from paceline.relay.transport.grpc_server import GrpcTransport

        return GrpcTransport(token, tls)
    return TcpTransport(token, tls)


def tls_for(runtime: Runtime, worker_id: str) -> TlsSettings | None:
    """Return the TLS files that the profile names for ``worker_id``, or None for plain TCP."""
    security = runtime.profile.security
    if security.peer_tls == "plaintext-anywhere":
        return None
    named = {name: getattr(security, name) for name in _FILES}
    missing = [name for name, path in named.items() if not path]
    if len(missing) == len(_FILES) and security.peer_tls == "auto":
        return None
    if missing:
        raise InvalidProfile(
            "mutual TLS between workers needs three files",
            got=f"nothing for {', '.join(missing)}",
            wanted=f"{', '.join(_FILES)} in [security]",
            where=f"profile {runtime.profile.name}",
            do="Name the authority's certificate, and this worker's certificate and key.",
        )
    ca, cert, key = (
        runtime.state_dir / Path(path.replace("{worker_id}", worker_id)) for path in named.values()
    )
    return TlsSettings(ca=ca, cert=cert, key=key)
