"""The example in examples/carried_state, as references name it."""

from __future__ import annotations

from pathlib import Path

from paceline.training.user_code import tree_digest

SOURCE = str(Path(__file__).parents[2] / "examples/carried_state")
BYTE_GRU = f"file://{SOURCE}@sha256:{tree_digest(Path(SOURCE))}#byte_gru:make"
