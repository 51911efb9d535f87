"""Print the digest that pins a code reference: ``python -m paceline.training.code_digest NAME``.

NAME is an installed module or a directory; it is not imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.errors import PacelineError
from paceline.training.user_code import module_digest, tree_digest


def main(arguments: list[str]) -> int:
    """Print the digest of ``arguments[0]`` and return the exit code."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m paceline.training.code_digest MODULE_OR_DIRECTORY\n")
        return 2
    (name,) = arguments
    try:
        digest = tree_digest(Path(name)) if Path(name).is_dir() else module_digest(name)
    except PacelineError as error:
        sys.stderr.write(error.one_line() + "\n")
        return error.exit_code
    sys.stdout.write(f"sha256:{digest}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
