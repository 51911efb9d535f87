"""Which of a user's modules may run here: the one rule for ``security.code_sources``."""

from __future__ import annotations

from collections.abc import Sequence


def module_allowed(module: str, sources: Sequence[str]) -> bool:
    """Return whether ``module`` is one of ``sources``, or inside of one."""
    return any(module == each or module.startswith(f"{each}.") for each in sources)
