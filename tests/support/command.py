"""`paceline WORDS` within the test's process: what it prints, and its exit code."""

from __future__ import annotations

import io
import logging
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from paceline.cli import run


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def paceline(*words: str | Path, **environment: str) -> Ended:
    """Run `paceline WORDS` with changes of the environment; a start of Python would cost 2 s."""
    out, err = io.StringIO(), io.StringIO()
    logger = logging.getLogger("paceline")
    handlers, code = list(logger.handlers), 0
    with (
        mock.patch.object(sys, "argv", ["paceline", *map(str, words)]),
        mock.patch.dict(os.environ, environment),
        # boto3's sessions keep the credentials of a process
        mock.patch.dict("paceline.storage.client._sessions", clear=True),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            run()
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            logger.handlers[:] = handlers
    return Ended(code, out.getvalue(), err.getvalue())
