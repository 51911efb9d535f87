"""The one key that every commit changes: what makes a commit happen once or never."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Tip:
    """What the newest commit left behind.

    ``commit`` names it, so that a commit that was sent twice is recognised as one's own. A commit
    requires the tip it knows: once another one is there, an older one cannot come to pass.
    """

    revision: int = 0  # of etcd, when it was written; 0: there is none yet
    commit: str = ""
    last: int = 0  # the newest event's number
    made: int = 0  # deployments so far
    pending: tuple[str, int] | None = None  # the journal of a commit that is not carried out yet

    @classmethod
    def read(cls, kvs: Sequence[Any]) -> Tip:
        """Return the tip in what a read of its key found."""
        if not kvs:
            return cls()
        raw = json.loads(kvs[0].value)
        pending = raw["pending"]
        return cls(
            revision=kvs[0].mod_revision,
            commit=raw["commit"],
            last=raw["last"],
            made=raw["made"],
            pending=None if pending is None else (pending[0], pending[1]),
        )

    def next(self, **changes: Any) -> Tip:
        """Return the tip of a new commit, not yet written."""
        return replace(self, commit=secrets.token_hex(8), **changes)

    def value(self) -> bytes:
        """Return what is put."""
        fields = {"commit": self.commit, "last": self.last, "made": self.made}
        return json.dumps({**fields, "pending": self.pending}).encode()
