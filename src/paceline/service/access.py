"""The routes about access itself: tokens, joining, and who changed what."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from paceline.coordinator import Coordinator
from paceline.coordinator.messages import IssueToken, RevokeToken
from paceline.coordinator.stores import Question
from paceline.coordinator.tokens import draw
from paceline.service.admission import Admission
from paceline.service.guard import Doorman
from paceline.wire.access import (
    CreatedToken,
    CreateJoinToken,
    CreateToken,
    JoinWorker,
    TokenList,
    TokenView,
    WorkerIdentity,
)
from paceline.wire.base import Name
from paceline.wire.calls import EventList, Success
from paceline.wire.events import EventName

MOST_ROWS = 1000
Seconds = Annotated[float | None, Query(ge=0, le=1e11, allow_inf_nan=False)]
Number = Annotated[int | None, Query(ge=0, le=2**62)]


def make_access_router(
    coordinator: Coordinator, admission: Admission, doorman: Doorman
) -> APIRouter:
    """Return the routes of tokens, joining and the audit history."""
    router = APIRouter()

    @router.post("/tokens", status_code=201, tags=["access"])
    def create_token(call: CreateToken) -> CreatedToken:
        """Make a bearer token; its secret is told this once."""
        drawn = draw()
        event = IssueToken(
            token_id=drawn.token_id, sha256=drawn.sha256, call=call, at=coordinator.now()
        )
        record = coordinator.handle(event)
        assert isinstance(record, TokenView)
        return CreatedToken(token=drawn.text, record=record)

    @router.post("/tokens/join", status_code=201, tags=["access"])
    def create_join_token(call: CreateJoinToken) -> CreatedToken:
        """Make a token with which one agent may join, once."""
        ca_sha256 = admission.ca_sha256()
        drawn = draw(ca_sha256)
        event = IssueToken(
            token_id=drawn.token_id, sha256=drawn.sha256, call=call, at=coordinator.now()
        )
        record = coordinator.handle(event)
        assert isinstance(record, TokenView)
        return CreatedToken(token=drawn.text, record=record, ca_sha256=ca_sha256)

    @router.get("/tokens", tags=["access"])
    def list_tokens() -> TokenList:
        """Every token that is remembered, also those that open nothing any more."""
        seen = doorman.seen
        tokens = coordinator.read(lambda state: state.tokens.tokens())
        return TokenList(tokens=tuple(TokenView.of(e, seen.get(e.token_id)) for e in tokens))

    @router.delete("/tokens/{token_id}", tags=["access"])
    def revoke_token(token_id: Annotated[Name, Path()]) -> Success:
        """Have a token open nothing any more, from the next call on.

        A worker's token ends with every token of that worker, a spent join token with what was
        joined with it.
        """
        answer = coordinator.handle(RevokeToken(token_id=token_id, at=coordinator.now()))
        assert isinstance(answer, Success)
        return answer

    @router.post("/workers/join", tags=["access"])
    def join_worker(call: JoinWorker) -> WorkerIdentity:
        """Spend a join token for a worker's certificate and token.

        Called again with the same key while the token lasts, it is answered again.
        """
        return admission.admit(call)

    @router.post("/workers/renew", tags=["access"])
    def renew_worker(call: JoinWorker) -> WorkerIdentity:
        """Exchange a worker's token and certificate for the next ones, before they expire."""
        return admission.admit(call)

    @router.get("/audit", tags=["access"])
    def get_audit(
        after: Number = 0,
        before: Number = None,
        limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = 100,
        newest_first: bool = False,
        name: Annotated[list[EventName] | None, Query(max_length=50)] = None,
        deployment_id: Annotated[str | None, Query(max_length=128)] = None,
        worker_id: Annotated[Name | None, Query()] = None,
        since: Seconds = None,
        until: Seconds = None,
    ) -> EventList:
        """The history: what happened, who changed what from where, and what was refused."""
        asked = Question(
            after=after or 0,
            before=before,
            limit=limit,
            newest_first=newest_first,
            names=tuple(name or ()),
            deployment_id=deployment_id,
            worker_id=worker_id,
            since=since,
            until=until,
        )
        rows = coordinator.history(asked)
        return EventList(events=tuple(rows), last=max((e.seq for e in rows), default=after or 0))

    @router.get("/ca.pem", tags=["access"], response_class=Response)
    def get_authority() -> Response:
        """The authority's certificate, which is public."""
        return Response(admission.ca_pem(), media_type="application/x-pem-file")

    return router
