"""Fetch pinned code to this node and load it in this process.

A commit or a directory is copied once and verified at each use; before the import from that copy
the environment is scrubbed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import scrub_variables
from paceline.errors import (
    AccessDenied,
    CorruptData,
    InvalidInput,
    MissingTool,
    ServiceUnavailable,
    TrainingFailed,
)
from paceline.training.user_code.reference import (
    DIAL,
    CodeRef,
    files_of,
    module_digest,
    parse,
    require_allowed,
    tree_digest,
)

if TYPE_CHECKING:
    from torch import nn

    from paceline.config import Profile
    from paceline.schemas import TrainJob
    from paceline.training.loop import Workload

MAX_MESSAGE_CHARACTERS = 2000
FETCH_S = 120.0  # one git command


@dataclass(frozen=True)
class Task:
    """The arguments of a user's task function."""

    seed: int = 0
    context: int = 256  # tokens of a row
    vocabulary: int = 256
    parameters: int = 100_000  # a target: the profile's setting


def task_of(job: TrainJob, profile: Profile, vocabulary: int) -> Task:
    """Return what ``job``'s code is called with, for data of ``vocabulary`` tokens."""
    from paceline.training.identity import task_size_of  # a metric's process needs no jobs

    size = task_size_of(job, profile)
    return Task(
        seed=job.settings.seed,
        context=size.context,
        vocabulary=vocabulary,
        parameters=size.parameters or profile.model.parameters,
    )


def load(
    text: str, sources: Sequence[str], cache: Path, task: Task, *, scrub_environment: bool = True
) -> Workload:
    """Return the workload that ``text`` names, in this process and without ambient credentials.

    Raises InvalidInput (malformed, unpinned, not a workload), AccessDenied (source not allowed),
    CorruptData (content differs from the pin), ServiceUnavailable (cannot be fetched),
    TrainingFailed (the code raised).
    """
    ref, entry = load_function(text, sources, cache, scrub_environment=scrub_environment)
    try:
        found = entry(task)
    except Exception as error:
        raise user_code_error("code reference raised", ref, error) from error
    return require_workload(found, ref)


def load_function(
    text: str,
    sources: Sequence[str],
    cache: Path,
    dial: str = DIAL,
    *,
    scrub_environment: bool = True,
) -> tuple[CodeRef, Any]:
    """Return the reference ``text`` of the setting ``dial``, and its function; as ``load``."""
    ref = parse(text, dial)
    require_allowed(ref, sources)
    tree = fetch(ref, cache)
    if scrub_environment:
        scrub_variables(os.environ)
    return ref, _entry(ref, tree)


def require_workload(found: Any, ref: CodeRef) -> Workload:
    """Return ``found`` if it is a workload; raises InvalidInput otherwise."""
    from paceline.training.loop import Workload

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


def build_model(workload: Workload, ref: CodeRef) -> nn.Module:
    """Return the model that ``workload`` builds, in memory (with any values where it builds on the
    meta device); raises TrainingFailed where the code raises, InvalidInput where it returns another
    thing."""
    from torch import nn

    try:
        model = workload.build()
    except Exception as error:
        raise user_code_error(
            "code reference raised while it built its model", ref, error
        ) from error
    if not isinstance(model, nn.Module) or not any(True for _ in model.parameters()):
        raise InvalidInput(
            "code reference builds no model",
            got=type(model).__name__,
            wanted="a torch.nn.Module with parameters",
            where=ref.where,
        )
    meta = any(each.is_meta for each in model.parameters())
    return model.to_empty(device="cpu") if meta else model


def user_code_error(what: str, ref: CodeRef, error: Exception) -> TrainingFailed:
    """Return the error that describes an exception of user code."""
    said = f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARACTERS]
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
        raise user_code_error("code reference cannot be imported", ref, error) from error
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


def fetch(ref: CodeRef, cache: Path) -> Path | None:
    """Return the directory from which to import ``ref``, verified; None for an installed module.

    A commit, or a directory, is copied into ``cache`` once, whole or not at all, and verified
    against its digest each time.
    """
    if ref.kind == "module":
        if (got := module_digest(ref.module)) != ref.pin:
            raise _changed(ref, got)
        return None
    name = hashlib.sha256(f"{ref.url}@{ref.pin}".encode()).hexdigest()
    tree, seal = cache / name, cache / f"{name}.sha256"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks of one node fetch once; git has a timeout
        if not seal.exists():
            shutil.rmtree(tree, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix="fetch-") as scratch:
                fresh = Path(scratch) / "tree"
                if ref.kind == "git":
                    _clone(ref, fresh)
                else:
                    _copy(ref.directory, fresh)
                seal_text = tree_digest(fresh)
                if ref.kind == "directory" and seal_text != ref.pin:
                    raise _changed(ref, seal_text)
                fresh.replace(tree)
            seal.write_text(seal_text)
        if (got_digest := tree_digest(tree)) != seal.read_text():
            shutil.rmtree(tree, ignore_errors=True)
            seal.unlink()
            raise CorruptData(
                "fetched code changed on disk",
                got=got_digest,
                where=tree,
                do="It is fetched again at the next start.",
            )
    return tree


def _copy(source: Path, target: Path) -> None:
    if not list(files_of(source)):  # checks each of them
        raise InvalidInput("code directory is not there, or empty", where=source)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, target, ignore=ignored, copy_function=shutil.copyfile)


def _clone(ref: CodeRef, target: Path) -> None:
    """Write the commit's files into ``target``: no credentials, hooks, submodules or helpers."""
    if shutil.which("git") is None:
        raise MissingTool("git is not installed", wanted="git", do="Install it on every node.")
    target.mkdir(parents=True)
    # A server also has the commits that anybody proposes (refs/pull/…): those are not the owners'.
    if ref.pin not in _git(ref, target, "ls-remote", "--heads", "--tags", ref.url).split():
        with tempfile.TemporaryDirectory(dir=target.parent) as made:
            history = Path(made)
            _git(ref, history, "init", "-q")
            _git(ref, history, "remote", "add", "origin", ref.url)
            commits = () if ref.url.startswith("file://") else ("--filter=tree:0",)
            _git(ref, history, "fetch", "-q", *commits, "--tags", "origin")
            if ref.pin not in _git(ref, history, "rev-list", "--remotes", "--tags").split():
                raise AccessDenied(
                    "commit is on no branch or tag of its repository",
                    got=ref.pin,
                    wanted="one that the owners of the repository have merged",
                    where=ref.url,
                )
    _git(ref, target, "init", "-q")
    alone = ("--depth", "1", "--no-tags", "--no-recurse-submodules")
    _git(ref, target, "fetch", "-q", *alone, ref.url, ref.pin)
    _git(ref, target, "checkout", "-q", "--detach", ref.pin)
    if (got := _git(ref, target, "rev-parse", "HEAD")) != ref.pin:
        raise CorruptData("another commit came", got=got, wanted=ref.pin, where=ref.url)
    shutil.rmtree(target / ".git")


def _git(ref: CodeRef, directory: Path, *words: str) -> str:
    """Return what git says in ``directory``; raises ServiceUnavailable where it fails."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    environment = kept | {
        "HOME": str(directory.parent),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "/bin/false",
        "GIT_ALLOW_PROTOCOL": ref.url.partition("://")[0],
        # For a parent that a server does not have git would start itself again, without end.
        "GIT_NO_LAZY_FETCH": "1",
    }
    settings = (
        "core.hooksPath=/dev/null",
        "core.symlinks=false",
        "safe.directory=*",
        "http.followRedirects=false",  # one would lead past the allow-list
    )
    options = [word for each in settings for word in ("-c", each)]
    try:
        done = subprocess.run(
            ["git", *options, "-C", str(directory), *words],
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # names of branches are any bytes
            env=environment,
            timeout=FETCH_S,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise ServiceUnavailable(
            "code cannot be fetched", got=f"no answer in {FETCH_S:.0f} s", where=ref.url
        ) from error
    except subprocess.CalledProcessError as error:
        raise ServiceUnavailable(
            "code cannot be fetched",
            got=(error.stderr.strip().splitlines() or ["nothing said"])[-1][:300],
            wanted=f"commit {ref.pin}",
            where=ref.url,
        ) from error
    return done.stdout.strip()


def _changed(ref: CodeRef, got: str) -> CorruptData:
    return CorruptData(
        "code is not what the reference is pinned to",
        got=f"sha256:{got}",
        wanted=f"sha256:{ref.pin}",
        where=ref.url or ref.module,
    )
