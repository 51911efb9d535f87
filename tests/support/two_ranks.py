"""Two real ranks of a test module that is run with ``-m``, and the JSON that each ends with."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_two(module: str, *arguments: str) -> list[dict[str, Any]]:
    """Run ``module RANK PORT *arguments`` twice at once; return the last line of each, by rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(port), *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [each.communicate(timeout=100) for each in started]
    finally:
        for each in started:
            each.kill()
    for (_, err), each in zip(said, started, strict=True):
        assert each.returncode == 0, err[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in said]
