"""Whether peers will accept this worker's own credentials: asked before its port is opened.

A worker whose certificate is another's, of another authority or out of date would start, register
and be planned in, and then be refused by everybody. Knows no sockets: both sides of a handshake run
in memory, by the contexts that real connections use.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from typing import Any

from paceline.errors import InvalidInput
from paceline.relay.wires.tls import TlsSettings, peer_ids

_ROUNDS = 4  # a handshake of TLS 1.3 takes two


def require_own(tls: TlsSettings, worker_id: str) -> None:
    """Return where ``tls`` shows ``worker_id`` to peers of the same authority.

    Raises InvalidInput that says why they would refuse it.
    """
    shown = _shown(tls)
    names = [value for kind, value in shown.get("subjectAltName", ()) if kind == "URI"]
    if peer_ids(names) != [worker_id]:
        raise InvalidInput(
            "this is another worker's certificate",
            got=", ".join(peer_ids(names)) or "one that names no worker",
            wanted=worker_id,
            where=tls.cert,
            do="Start the agent as that worker, or issue this one an identity of its own.",
        )


def _shown(tls: TlsSettings) -> dict[str, Any]:
    """Return the certificate as a peer reads it."""
    server, client = tls.context(server=True), tls.context(server=False)
    server.verify_mode = ssl.CERT_NONE  # one side has to be convinced; the files are the same
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
