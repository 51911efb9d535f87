"""A user's module (``training.code_ref``) that is judged: its code runs in a process of its own.

That process imports the code where ``security.code_sources`` allows it and its pin matches, and
returns the logits of rows of tokens. Figures are computed here. This process never imports the
code.
"""

from __future__ import annotations

import json
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data import FAILED, ChildProcess, how_ended
from paceline.errors import PermanentError, TrainingFailed, from_record, short_repr

if TYPE_CHECKING:
    from torch import Tensor

CHILD = "paceline.training.user_code.next_tokens"  # by its name: no layer below imports training
DEADLINE_S = 600.0  # fetch, import and build, or one batch
MAX_ANSWER_BYTES = 64 * 1024  # but logits: facts, or an error


@dataclass(frozen=True)
class AllowedCode:
    """Which user code may run to judge a model, and where it is fetched to."""

    sources: tuple[str, ...]  # security.code_sources
    cache: Path


class UserModel:
    """The network of a user's model: called with tokens_BT, it returns logits_BTV in float32 on
    their device. One call at a time; its process ends with this object."""

    def __init__(self, directory: Path, code_ref: str, allowed: AllowedCode, device: str) -> None:
        """Open the model in ``directory``; raises what its process does, with the same parts."""
        self.threads = 1  # of its process
        self._where, self._lock = f"training.code_ref {code_ref}", threading.Lock()
        self._child = ChildProcess(
            "the process of user code",
            CHILD,
            env={"OMP_WAIT_POLICY": "PASSIVE"},
            secrets_only=False,
        )
        weakref.finalize(self, self._child.end)
        self.pid = self._child.pid
        self._child.wait_until_ready()
        asked = {
            "directory": str(directory),
            "sources": list(allowed.sources),
            "cache": str(allowed.cache),
            "device": device,
        }
        answer = self._ask(json.dumps(asked).encode())
        try:
            facts: dict[str, Any] = json.loads(answer)
            self.width, self.parameters = int(facts["width"]), int(facts["parameters"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self._odd(answer) from error

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        import torch

        rows, length = tokens_BT.shape
        head = json.dumps({"rows": rows, "threads": self.threads}).encode()
        wanted = 4 * rows * length * self.width
        answer = self._ask(head + b"\n" + tokens_BT.cpu().numpy().tobytes(), wanted)
        if len(answer) != wanted:
            raise self._odd(answer)
        logits = torch.frombuffer(bytearray(answer), dtype=torch.float32)
        return logits.view(rows, length, self.width).to(tokens_BT.device)

    def _odd(self, answer: bytes) -> TrainingFailed:
        return TrainingFailed(
            "code reference wrote to its process's socket",
            got=f"{len(answer)} bytes: {short_repr(answer[:40])}",
            wanted="an answer of Paceline's",
            where=self._where,
        )

    def _ask(self, request: bytes, most_bytes: int = 0) -> bytes:
        """Return the answer, of at most ``most_bytes`` or MAX_ANSWER_BYTES."""
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
            raise self._odd(answer) from odd
        if isinstance(found, PermanentError) or not most_bytes:  # what is fetched may come later
            raise found
        raise TrainingFailed(found.what, got=found.got, where=self._where) from found
