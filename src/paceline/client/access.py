"""The calls about access: tokens, joining, renewing, the audit history, from the caller's side."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote, urlencode

from paceline.client.calls import CoordinatorClient
from paceline.errors import NotFound
from paceline.wire.access import (
    CreatedToken,
    CreateJoinToken,
    CreateToken,
    JoinWorker,
    TokenList,
    TokenView,
    WorkerIdentity,
)
from paceline.wire.calls import EventList, Success
from paceline.wire.events import Event


class AccessClient(CoordinatorClient):
    """A client that may also say who may call."""

    def create_token(self, call: CreateToken) -> CreatedToken:
        """Make a bearer token; its text comes this once."""
        return self._call(CreatedToken, "POST", "/tokens", call)

    def create_join_token(self, call: CreateJoinToken) -> CreatedToken:
        """Make a join token for one worker; its text comes this once."""
        return self._call(CreatedToken, "POST", "/tokens/join", call)

    def tokens(self) -> list[TokenView]:
        """Return every token that is remembered, oldest first."""
        return list(self._call(TokenList, "GET", "/tokens").tokens)

    def revoke_token(self, token_id: str) -> None:
        """Have a token open nothing any more, and with a worker's all of that worker's.

        Raises NotFound.
        """
        self._call(Success, "DELETE", f"/tokens/{quote(token_id, safe='')}")

    def revoke_worker(self, worker_id: str) -> list[str]:
        """Take a worker out, and have no join token for it open anything any more.

        Return the ids of what was ended; raises NotFound where there was nothing to end.
        """
        ended: list[str] = []
        for each in self.tokens():
            if each.worker_id == worker_id and each.revoked_at is None:
                self.revoke_token(each.token_id)  # a worker's token ends with all of that worker
                ended.append(each.token_id)
        if not ended:
            raise NotFound(
                "this worker has no token", got=worker_id, do="See `paceline tokens list`."
            )
        return ended

    def join(self, call: JoinWorker) -> WorkerIdentity:
        """Spend this client's join token for an identity, or get another for the same key.

        Raises AccessDenied where it was spent for another key.
        """
        return self._call(WorkerIdentity, "POST", "/workers/join", call)

    def renew(self, call: JoinWorker) -> WorkerIdentity:
        """Return the worker's next identity."""
        return self._call(WorkerIdentity, "POST", "/workers/renew", call)

    def ca_pem(self) -> bytes:
        """Return the authority's certificate."""
        return self._request("GET", "/ca.pem")

    def audit(
        self,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int = 100,
        newest_first: bool = False,
        names: Sequence[str] = (),
        deployment_id: str | None = None,
        worker_id: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> list[Event]:
        """Return what the audit history has of that."""
        asked: list[tuple[str, object]] = [("after", after), ("limit", limit)]
        asked += [("name", name) for name in names]
        asked += [("newest_first", "true")] if newest_first else []
        optional = {
            "before": before,
            "deployment_id": deployment_id,
            "worker_id": worker_id,
            "since": since,
            "until": until,
        }
        asked += [(key, value) for key, value in optional.items() if value is not None]
        return list(self._call(EventList, "GET", f"/audit?{urlencode(asked)}").events)
