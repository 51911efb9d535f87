"""Where a stream stands: small JSON that means the same to any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from paceline.errors import InvalidInput


@dataclass(frozen=True, kw_only=True)
class Position:
    """The next global batch: its number, and the row it starts with.

    What makes rows and batches is named too, so that a position is refused by another stream.
    """

    batching: str
    context: int
    global_batch: int
    seed: int
    columns: int = 1  # that the rows of a batch are read in; positions kept before had none
    batch: int = 0
    epoch: int = 0
    group: int = 0  # of shards, within the epoch
    item: int = 0  # row within the group

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return asdict(self)

    def resumed(self, kept: Mapping[str, Any] | None) -> Position:
        """Return the position that ``to_json`` gave, or this one where there is none.

        Raises InvalidInput for one that is malformed or of a stream with other settings.
        """
        if kept is None:
            return self
        kept = {"columns": 1, **kept}
        names = {each.name for each in fields(self)}
        numbers = names - {"batching"}
        if set(kept) != names or any(
            type(kept[name]) is not int or (name != "seed" and kept[name] < 0) for name in numbers
        ):
            raise InvalidInput(
                "not a position in a data stream", got=dict(kept), wanted=f"{sorted(names)}"
            )
        for name in ("batching", "context", "global_batch", "seed", "columns"):
            if kept[name] != getattr(self, name):
                raise InvalidInput(
                    f"position is of a stream with another {name}",
                    got=kept[name],
                    wanted=getattr(self, name),
                    do="Resume with the settings the job began with, or start a new job.",
                )
        return Position(**kept)
