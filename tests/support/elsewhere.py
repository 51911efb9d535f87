"""Another environment: a Python with every package but paceline, and without a network."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

_ENVIRONMENT = """
import importlib.util, sys
def offline(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise OSError(f"there is no network: {event} {arguments[1:]}")
sys.addaudithook(offline)
sys.path.append(sys.argv.pop(1))
assert importlib.util.find_spec("paceline") is None
"""
LOGITS = """
import json, sys, torch
from transformers import AutoModelForCausalLM
tokens = torch.tensor([json.loads(sys.argv[1])])
for directory in sys.argv[2:]:
    with torch.no_grad():
        print(json.dumps(AutoModelForCausalLM.from_pretrained(directory)(tokens).logits[0].tolist()))
"""


def run_elsewhere(environment: Path, program: str, *arguments: str | Path) -> str:
    """Return what ``program`` prints in a process that has nothing of this one's variables.

    Its path is the standard library and links, in the directory ``environment``, to all other
    packages.
    """
    environment.mkdir(exist_ok=True)
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        link = environment / each.name
        if "paceline" not in each.name and not link.is_symlink():
            link.symlink_to(each)
    words = map(str, (_ENVIRONMENT + program, environment, *arguments))
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", *words],
        env={"HOME": str(environment), "HF_HUB_OFFLINE": "1"}, cwd=environment,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def logits_elsewhere(
    environment: Path, tokens: Sequence[int], *directories: Path
) -> list[list[list[float]]]:
    """Return the logits (tokens × vocabulary) that ``from_pretrained`` of each directory gives."""
    printed = run_elsewhere(environment, LOGITS, json.dumps(list(tokens)), *directories)
    return [json.loads(line) for line in printed.splitlines()]
