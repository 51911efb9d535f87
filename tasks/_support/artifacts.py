"""What a stage leaves on Prefect's pages: progress, tables, markdown and links.

Outside a flow run (``.fn()`` in tests, plain Python) these do nothing, because there is no page.
"""

from __future__ import annotations

import contextvars
import logging
import re
import threading
import time
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging import get_run_logger
from prefect.logging.handlers import APILogHandler

from paceline.errors import AwaitingApproval, Cancelled
from paceline.schemas import SHA256_HEX
from paceline.units import size

logger = logging.getLogger(__name__)

DIGEST_SHOWN = 12
REFRESH_S = 1.0  # one call to the server a second is what a page can show
END_S = 45.0  # for the last figure


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def on_a_page() -> bool:
    """Return whether this code runs inside a Prefect flow or task run."""
    return FlowRunContext.get() is not None or TaskRunContext.get() is not None


class _PageLogHandler(APILogHandler):
    """Sends records of code that runs in a flow or task run; others have no page."""

    def emit(self, record: logging.LogRecord) -> None:
        if on_a_page():
            super().emit(record)


def send_log() -> None:
    """Have Prefect show the library's log on the run's page, whichever process runs the flow."""
    package = logging.getLogger("paceline")
    if package.level == logging.NOTSET:  # else the root's WARNING counts
        package.setLevel(logging.INFO)
    if not any(isinstance(each, APILogHandler) for each in package.handlers):
        package.addHandler(_PageLogHandler())
    for name in ("flow_runs", "engine"):
        logging.getLogger(f"prefect.{name}").addFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Make one line of a flow's end that is no error: where a deployment's flow run ends as
    CANCELLED, Prefect's engine logs "unexpected exception" with a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, Cancelled | AwaitingApproval):
        record.msg = error.one_line()
        if isinstance(error, AwaitingApproval):
            record.msg = f"waiting for {error.wanted}: {error.do}"
        record.args, record.exc_info = (), None
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


def own_log() -> logging.Logger | logging.LoggerAdapter[logging.Logger]:
    """Return the log of this flow's own page: what is written to it by the flows that it starts
    stays on this page. Outside a flow run, the library's log."""
    return get_run_logger() if on_a_page() else logger


def table(name: str, rows: list[dict[str, Any]], description: str) -> None:
    """Show ``rows`` as a table artifact called ``name``, in columns that a person can read."""
    if on_a_page():
        shown = [readable(each) for each in rows]
        create_table_artifact(table=shown, key=_key(name), description=description)


def readable(row: dict[str, Any]) -> dict[str, Any]:
    """Return ``row`` for a page: names without underscores, digests cut to 12 characters, sizes and
    seconds with their units, other figures rounded."""
    found = {}
    for key, value in row.items():
        name, is_number = key, isinstance(value, int | float) and not isinstance(value, bool)
        if key == "bytes" or key.endswith("_bytes"):
            name, value = (key if key == "bytes" else key[:-6]), size(value or 0)  # noqa: PLW2901
        elif is_number and (key == "seconds" or key.endswith("_seconds")):
            value = f"{value:.2f} s"  # noqa: PLW2901
        elif isinstance(value, float):
            value = f"{value:.4g}"  # noqa: PLW2901
        elif isinstance(value, str) and re.fullmatch(SHA256_HEX, value):
            value = value[:DIGEST_SHOWN]  # noqa: PLW2901
        found[name.replace("_", " ")] = value
    return found


def markdown(name: str, text: str, description: str) -> None:
    """Show ``text`` as a markdown artifact called ``name``."""
    if on_a_page():
        create_markdown_artifact(markdown=text, key=_key(name), description=description)


def link(name: str, url: str, text: str) -> None:
    """Show ``url`` as a link artifact called ``name``."""
    if on_a_page():
        create_link_artifact(link=url, link_text=text, key=_key(name), description=text)


class Progress:
    """A progress artifact that is refreshed at most once a second; as a ``with``, it ends at 100
    where the work does.

    Best effort: what it shows goes on where Prefect's server is away for a moment. Once made, only
    its end waits for a server that hangs: ``END_S`` for the figure before, ``END_S`` for the last.
    """

    def __init__(self, name: str, description: str) -> None:
        self._at = 0.0
        self._id: UUID | None = None
        self._sending: threading.Thread | None = None
        if on_a_page():
            try:
                created = create_progress_artifact(
                    progress=0.0, key=_key(name), description=description
                )
            except Exception as error:  # noqa: BLE001 - hours of work do not hang on a bar
                logger.warning("no progress can be shown: %s", error)
            else:
                self._id = created if isinstance(created, UUID) else None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.show(1.0)

    def show(self, fraction: float, description: str | None = None) -> None:
        """Show ``fraction`` (0 to 1), with what else there is to say."""
        now, is_end = time.monotonic(), fraction >= 1.0
        if self._id is None or (now - self._at < REFRESH_S and not is_end):
            return
        if self._sending is not None:
            self._sending.join(END_S if is_end else 0.0)  # an older figure must not come later
            if self._sending.is_alive():
                return
        self._at = now
        context = contextvars.copy_context()  # Prefect's, of the run whose page it is
        self._sending = threading.Thread(
            target=context.run,
            args=(_send, self._id, fraction, description),
            name="page",
            daemon=True,
        )
        self._sending.start()
        if is_end:
            self._sending.join(END_S)


def _send(artifact_id: UUID, fraction: float, description: str | None) -> None:
    try:
        update_progress_artifact(
            artifact_id=artifact_id, progress=round(100 * fraction, 1), description=description
        )
    except Exception as error:  # noqa: BLE001 - hours of work do not hang on a bar
        logger.warning("progress cannot be shown: %s", error)
