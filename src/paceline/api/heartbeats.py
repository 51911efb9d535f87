"""Fast path for ``POST /workers/heartbeat``, which is most of a coordinator's calls.

``HeartbeatMiddleware`` runs after ``AccessMiddleware`` and before the routes. A heartbeat that only
reports progress is parsed once, decided on the event loop and answered without a thread, in about a
quarter of the time that its route takes (docs/measurements). A malformed one goes to the
route in ``api.deployments``; one that must be committed, or that finds the state locked, goes to a
worker thread. All are answered as the route documents.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from fastapi import HTTPException
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.api.problems import problem_response
from paceline.coordinator import Coordinator, require_worker
from paceline.coordinator.state import AwaitCommands, HeartbeatReceived
from paceline.errors import PacelineError
from paceline.schemas import Heartbeat, HeartbeatAnswer

PATH = "/workers/heartbeat"
LONGEST_POLL_S = 30.0
QUERY = re.compile(rb"(?:wait_s=(\d{1,2}(?:\.\d{1,6})?))?")  # the route answers anything else
JSON = (b"content-type", b"application/json")


class HeartbeatMiddleware:
    """ASGI middleware that answers ``POST /workers/heartbeat`` and passes on everything else."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        coordinator: Coordinator,
        is_outdated: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app, self._coordinator, self._is_outdated = app, coordinator, is_outdated

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = (
            QUERY.fullmatch(scope["query_string"])
            if scope["type"] == "http" and scope["path"] == PATH and scope["method"] == "POST"
            else None
        )
        wait_s = float(asked.group(1) or 0.0) if asked else 0.0
        if asked is None or wait_s > LONGEST_POLL_S or JSON not in scope["headers"]:
            await self._app(scope, receive, send)
            return
        arrived = BufferedBody(receive)
        try:
            beat = Heartbeat.model_validate_json(await arrived.body())
        except (ValueError, HTTPException):  # the route reports the error
            await self._app(scope, arrived.again, send)
            return
        try:
            require_worker(beat.worker_id)
            answer = await answer_beat(self._coordinator, beat, wait_s, self._is_outdated)
        except PacelineError as error:
            await problem_response(error)(scope, receive, send)
            return
        body = answer.model_dump_json(by_alias=True).encode()
        headers = [JSON, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def answer_beat(
    coordinator: Coordinator,
    beat: Heartbeat,
    wait_s: float,
    is_outdated: Callable[[], bool] = lambda: False,
) -> HeartbeatAnswer:
    """Process a heartbeat and return its answer, waiting up to ``wait_s`` seconds for a command.

    Where the caller's identity ``is_outdated``, the answer has it renewed. Raises the coordinator's
    errors.
    """
    answer = await _await_commands(coordinator, beat, wait_s)
    return answer.model_copy(update={"renew": True}) if is_outdated() else answer


async def _await_commands(
    coordinator: Coordinator, beat: Heartbeat, wait_s: float
) -> HeartbeatAnswer:
    answer = await _decide(coordinator, HeartbeatReceived(beat=beat, at=coordinator.now()))
    if wait_s <= 0 or not answer.go_on or answer.commands:
        return answer
    listen = AwaitCommands(worker_id=beat.worker_id, incarnation=beat.incarnation)
    clock = asyncio.get_running_loop().time
    until_s = clock() + wait_s
    news: asyncio.Future[None] | None = None
    try:
        while answer.go_on and not answer.commands and not coordinator.stopping:
            left_s = until_s - clock()
            if left_s <= 0:
                break
            if news is None or news.done():
                news = coordinator.notifier.listen()  # before the read: no command is missed
            else:
                await asyncio.wait([news], timeout=left_s)
                if not news.done():
                    break
            answer = await _decide(coordinator, listen)
    finally:
        if news is not None:
            coordinator.notifier.leave(news)
    return answer


async def _decide(
    coordinator: Coordinator, event: HeartbeatReceived | AwaitCommands
) -> HeartbeatAnswer:
    answer = coordinator.try_decide(event)
    if answer is None:
        slow = await run_in_threadpool(coordinator.handle, event)
        assert isinstance(slow, HeartbeatAnswer)
        return slow
    return answer


class BufferedBody:
    """Buffers a request's body, so that the route can read it again."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: list[Message] = []
        self._error: HTTPException | None = None

    async def body(self) -> bytes:
        """Return the whole body; raises AccessMiddleware's HTTPException if it is too long."""
        try:
            while not self._messages or self._messages[-1].get("more_body", False):
                self._messages.append(await self._receive())
        except HTTPException as error:
            self._error = error
            raise
        return b"".join(each.get("body", b"") for each in self._messages)

    async def again(self) -> Message:
        """Return the next message, as if none had been read."""
        if self._messages:
            return self._messages.pop(0)
        if self._error is not None:
            raise self._error
        return await self._receive()
