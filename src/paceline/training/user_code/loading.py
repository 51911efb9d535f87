"""Load user code in this process: scrub the environment, import it from its tree, call it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config.settings import scrub
from paceline.errors import InvalidInput, TrainingFailed
from paceline.training.user_code.fetching import fetch
from paceline.training.user_code.reference import CodeRef, parse, require_allowed

if TYPE_CHECKING:
    from paceline.training.loop.workload import Workload

SAID_CHARACTERS = 2000


@dataclass(frozen=True)
class Task:
    """The arguments of a user's task function."""

    seed: int = 0
    context: int = 256  # tokens of a row
    vocabulary: int = 256
    parameters: int = 100_000  # a target: the profile's setting


def load(
    text: str, sources: Sequence[str], cache: Path, task: Task, *, scrub_environment: bool = True
) -> Workload:
    """Return the workload that ``text`` names, in this process and without ambient credentials.

    Raises InvalidInput (malformed, unpinned, not a workload), AccessDenied (source not allowed),
    CorruptData (content differs from the pin), ServiceUnavailable (cannot be fetched),
    TrainingFailed (the code raised).
    """
    ref = parse(text)
    return require_workload(
        call(ref, sources, cache, task, scrub_environment=scrub_environment), ref
    )


def call(
    ref: CodeRef,
    sources: Sequence[str],
    cache: Path,
    *arguments: object,
    scrub_environment: bool = True,
) -> Any:
    """Return the result of the function that ``ref`` names, called in this process without ambient
    credentials; raises the errors of ``load``.
    """
    require_allowed(ref, sources)
    tree = fetch(ref, cache)
    if scrub_environment:
        scrub(os.environ)
    entry = _entry(ref, tree)
    try:
        return entry(*arguments)
    except Exception as error:
        raise raised("code reference raised", ref, error) from error


def require_workload(found: Any, ref: CodeRef) -> Workload:
    """Return ``found`` if it is a workload; raises InvalidInput otherwise."""
    from paceline.training.loop.workload import Workload

    if isinstance(found, type) or not isinstance(found, Workload):
        missing = [
            name
            for name in ("build", "inputs", "loss_sum")
            if not callable(getattr(found, name, None))
        ]
        raise InvalidInput(
            "code reference returned no workload",
            got=f"{type(found).__name__} without {', '.join(missing) or 'an instance'}",
            wanted="an object with build, inputs and loss_sum",
            where=ref.where,
        )
    return found


def raised(what: str, ref: CodeRef, error: Exception) -> TrainingFailed:
    """Return the error that describes an exception of user code."""
    said = f"{type(error).__name__}: {error}"[:SAID_CHARACTERS]
    return TrainingFailed(
        what,
        got=f"{said}{_line_of(error)}",
        where=ref.where,
        do="Mend the code, pin it anew, and start the job again.",
    )


def _line_of(error: Exception) -> str:
    """Return the innermost line of the traceback in user code; "" for none."""
    ours = str(Path(__file__).parents[2])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = frame.filename
        if not (file.startswith((ours, "<", sys.base_prefix)) or "site-packages" in file):
            return f" ({Path(file).name}, line {frame.lineno})"
    return ""


def _entry(ref: CodeRef, tree: Path | None) -> Any:
    if tree is not None:
        _require_own_name(ref, tree)
        if str(tree) not in sys.path:
            sys.path.append(str(tree))  # last, so that it hides no installed module
        importlib.invalidate_caches()
    try:
        with _no_bytecode():
            module = importlib.import_module(ref.module)
        entry = getattr(module, ref.function)
    except AttributeError as error:
        raise InvalidInput(
            "code reference names no function", got=ref.function, where=ref.where
        ) from error
    except Exception as error:
        raise raised("code reference cannot be imported", ref, error) from error
    file = getattr(module, "__file__", None) or ""
    if tree is not None and not Path(file).resolve().is_relative_to(tree.resolve()):
        raise InvalidInput(
            "code reference's module is hidden by another",
            got=file,
            wanted=f"a file below {tree}",
            do="Give the module a name that nothing installed has.",
        )
    if not callable(entry):
        raise InvalidInput(
            "code reference names no function", got=type(entry).__name__, where=ref.where
        )
    return entry


def _require_own_name(ref: CodeRef, tree: Path) -> None:
    """Raise InvalidInput for a module name that is taken, before any code of that name runs."""
    taken = ref.top in sys.stdlib_module_names
    if not taken and ref.top in sys.modules:
        file = getattr(sys.modules[ref.top], "__file__", None) or ""
        taken = not Path(file).resolve().is_relative_to(tree.resolve())
    elif not taken:
        spec = importlib.util.find_spec(ref.top)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        taken = origin is not None and not origin.is_relative_to(tree.resolve())
    if taken:
        raise InvalidInput(
            "code reference's module is hidden by another",
            got=ref.top,
            wanted="a name that nothing installed has",
            where=ref.where,
        )


@contextlib.contextmanager
def _no_bytecode() -> Iterator[None]:
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before
