"""The gate before the routes: what only the leader may answer goes to the leader.

A standby answers reads; anything else it sends on with 307, or refuses with 503 where nobody
leads. Every answer says which epoch and which leader it knows. A leader whose term ended while it
worked on an answer, because it was frozen or cut off, does not give it: what it said might not be
so any more. It knows no tokens; the guards stand before it.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.problems import problem_response
from paceline.coordinator.stores.contracts import Term
from paceline.errors import NotLeading
from paceline.wire.leading import EPOCH_HEADER, LEADER_HEADER

READS = ("GET", "HEAD", "OPTIONS")
DECIDING_READS = ("/lanes",)  # asking for lanes acknowledges the manifest


class LeaderGate:
    """Wraps the routes of one replica."""

    def __init__(self, app: ASGIApp, *, coordinator: Coordinator) -> None:
        self._app = app
        self._coordinator = coordinator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        coordinator = self._coordinator
        term = coordinator.term
        leader = coordinator.leader
        deciding = scope["method"] not in READS or scope["path"].endswith(DECIDING_READS)
        withheld = False

        async def stamped(message: Message) -> None:
            nonlocal withheld
            if message["type"] == "http.response.start":
                if deciding and term is not None and coordinator.term != term:
                    withheld = True
                    await self._refuse(scope, receive, send)
                    return
                headers = MutableHeaders(scope=message)
                headers[EPOCH_HEADER] = str(term.epoch if term else coordinator.leader_epoch)
                if leader is not None:
                    headers[LEADER_HEADER] = leader.url
            if not withheld:
                await send(message)

        if not deciding or term is not None:
            await self._app(scope, receive, stamped)
        elif leader is not None:
            redirect = Response(status_code=307, headers={"Location": _at(leader, scope)})
            await redirect(scope, receive, stamped)
        else:
            await problem_response(_nobody())(scope, receive, stamped)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {EPOCH_HEADER: str(self._coordinator.leader_epoch)}
        await problem_response(_nobody(), headers=headers)(scope, receive, send)


def _at(leader: Term, scope: Scope) -> str:
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope.get("query_string", b"")
    return leader.url + (path + (b"?" + query if query else b"")).decode("latin-1")


def _nobody() -> NotLeading:
    return NotLeading(
        "this replica does not lead",
        got="nobody is known to lead now",
        do="Call again in a second, or another replica.",
    )
