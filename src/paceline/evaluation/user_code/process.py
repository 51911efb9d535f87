"""The process in which user code runs beside an evaluation, which never imports it."""

from __future__ import annotations

import json
import threading
import weakref

from paceline.data import FAILED, ChildProcess, how_ended
from paceline.errors import PermanentError, TrainingFailed, from_record, short_repr

DEADLINE_S = 600.0  # fetch, import and build, or one batch
MAX_ANSWER_BYTES = 64 * 1024  # but logits: facts, figures, or an error


class UserProcess:
    """A child process of user code, without credentials; it ends with this object."""

    def __init__(self, module: str, where: str) -> None:
        """Start ``python -m module``; errors name ``where``."""
        self._where, self._lock = where, threading.Lock()
        self._child = ChildProcess(
            "the process of user code",
            module,
            env={"OMP_WAIT_POLICY": "PASSIVE"},
            secrets_only=False,
        )
        weakref.finalize(self, self._child.end)
        self.pid = self._child.pid
        self._child.wait_until_ready()

    def odd(self, answer: bytes) -> TrainingFailed:
        """Return the error of an ``answer`` that is not of Paceline's side of the process."""
        return TrainingFailed(
            "code reference wrote to its process's socket",
            got=f"{len(answer)} bytes: {short_repr(answer[:40])}",
            wanted="an answer of Paceline's",
            where=self._where,
        )

    def ask(self, request: bytes, most_bytes: int = 0) -> bytes:
        """Return the answer, of at most ``most_bytes`` or MAX_ANSWER_BYTES.

        Raises the error that the process reports, of a request with ``most_bytes`` a permanent one,
        and TrainingFailed where the code ends its process or does not end within DEADLINE_S.
        """
        with self._lock:
            try:
                self._child.send(request, DEADLINE_S)
                kind, answer = self._child.receive(DEADLINE_S, max(most_bytes, MAX_ANSWER_BYTES))
            except TimeoutError as error:
                self._child.kill()
                raise TrainingFailed(
                    "code reference does not come to an end",
                    got=f"nothing within {DEADLINE_S:.0f} s",
                    where=self._where,
                ) from error
            except (OSError, EOFError) as error:
                raise TrainingFailed(
                    "code reference ended its process",
                    got=how_ended(self._child.end()),
                    where=self._where,
                ) from error
        if kind != FAILED:
            return answer
        try:
            found = from_record(json.loads(answer))
        except (ValueError, TypeError, KeyError, RecursionError) as odd:
            raise self.odd(answer) from odd
        if isinstance(found, PermanentError) or not most_bytes:  # what is fetched may come later
            raise found
        raise TrainingFailed(found.what, got=found.got, where=self._where) from found
