"""Run Python or `paceline` as on a node where only the base distribution is installed.

    python -m tests.support.base_install -c CODE
    python -m tests.support.base_install COMMANDS    a JSON list of lists of words

Each command is `paceline WORDS` in a fork of this process; a line of JSON has its exit status and
what it wrote. Modules of distributions that requirements/base.lock does not name cannot be found.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
import tempfile
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

LOCK = Path(__file__).resolve().parents[2] / "requirements" / "base.lock"


def hidden_modules() -> set[str]:
    """Return the top-level modules that only the extras and the development tools install."""
    locked = set(re.findall(r"(?m)^([a-z0-9-]+)==", LOCK.read_text(encoding="utf-8")))
    owners = importlib.metadata.packages_distributions()
    base = {"paceline", *locked}
    return {
        module
        for module, names in owners.items()
        if not base & {re.sub(r"[-_.]+", "-", name).lower() for name in names}
    }


def hide(modules: set[str]) -> None:
    """Make ``modules`` unfindable in this process."""

    class Rest:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            return None if name in modules else PathFinder.find_spec(name, path, target)

    sys.meta_path[:] = [Rest if each is PathFinder else each for each in sys.meta_path]


def command(words: list[str]) -> tuple[int, str, str]:
    """Return the exit status of `paceline WORDS`, and what it wrote to stdout and stderr."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        if not (child := os.fork()):
            for file, number in ((out, 1), (err, 2)):
                os.dup2(file.fileno(), number)
            sys.argv[:] = ["paceline", *words]
            from paceline.cli import run

            run()
            sys.exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        err.seek(0)
        return status, out.read(), err.read()


def main() -> None:
    """Hide the extras, then run what the command line names."""
    hide(hidden_modules())
    if sys.argv[1] == "-c":
        exec(sys.argv[2], {"__name__": "__main__"})
        return
    import paceline.cli.installation  # noqa: F401 - once for all forks

    for words in json.loads(sys.argv[1]):
        sys.stdout.write(json.dumps(command(words)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
