"""A coordinator's app behind a real port, in a thread of the test's process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from tests.support.servers import free_port

READY_S = 60.0  # on a machine that many share


@contextlib.contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """Yield the URL under which ``app`` answers until the ``with`` ends."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until = time.monotonic() + READY_S
        while not server.started:
            assert thread.is_alive() and time.monotonic() < until, "the app does not start"
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)
