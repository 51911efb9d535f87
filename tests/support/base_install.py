"""Run Python or `paceline` as on a node where only the base distribution is installed.

    python -m tests.support.base_install WORDS...           `paceline WORDS`
    python -m tests.support.base_install -c CODE

Modules of distributions that requirements/base.lock does not name cannot be found here.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
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


def main() -> None:
    """Hide the extras, then run what the command line names."""
    hide(hidden_modules())
    words = sys.argv[1:]
    if words[0] == "-c":
        exec(words[1], {"__name__": "__main__"})
    else:
        from paceline.cli import run

        sys.argv[:] = ["paceline", *words]
        run()


if __name__ == "__main__":
    main()
