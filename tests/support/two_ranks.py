"""Two real ranks of a test module, and the JSON that each ends with."""

from __future__ import annotations

import json
from typing import Any

from tests.support.forked import run_gangs
from tests.support.servers import free_port


def run_two(module: str, *arguments: str) -> list[dict[str, Any]]:
    """Run ``module.main()`` twice at once, with RANK PORT *arguments; return the last line of each,
    by rank."""
    port = str(free_port())
    (ended,) = run_gangs(module, [[(str(rank), port, *arguments) for rank in range(2)]])
    for each in ended:
        assert each.code == 0, each.err[-3000:]
    return [json.loads(each.out.splitlines()[-1]) for each in ended]
