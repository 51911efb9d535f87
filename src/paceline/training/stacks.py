"""What a rank's stacks say: whether its main thread waits for other ranks, or hangs by itself.

Ranks that hang in the same phase since the same moment look alike from outside: all but one wait
for that one. Their stacks (Python's ``faulthandler``) tell them apart.
"""

from __future__ import annotations

import re

# Where the innermost frame of a rank is that waits: collectives, also those within a backward pass.
_WAITING = (
    "/torch/distributed/",
    "/torch/_ops.py",
    "/torch/autograd/graph.py",
    "/paceline/training/group.py",
    "/paceline/training/checkpoint/exchange.py",
)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "([^"]*)", line \d+ in (\S+)', re.MULTILINE)
_MAIN = ("run_rank", "main")  # functions that only a rank's main thread is in


def waits(text: str) -> bool | None:
    """Return whether the main thread in ``text`` waits for other ranks; None where it has none."""
    for section in reversed(_THREAD.split(text)):
        frames = _FRAME.findall(section)
        if any(path.endswith("/training/rank.py") and at in _MAIN for path, at in frames):
            return any(each in frames[0][0] for each in _WAITING)
    return None
