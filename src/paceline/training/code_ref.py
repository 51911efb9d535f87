"""A user's own task: ``training.code_ref`` names a function that returns a ``Workload``.

    paceline.training.recurrent:byte_gru                        ours: the release is the pin
    my_package.task:make@sha256:<digest>                        an installed module
    file:///srv/tasks@sha256:<digest>#task:make                 a directory
    git+https://host/repository.git@<40 hex digits>#task:make   a commit

Every reference is pinned and its source must stand in ``security.code_sources``; both are checked
before anything of it runs. The function is called with a ``Task`` and returns the workload.

What is guarded: which code runs (allow-list and pin), that it changes unseen (the digest is checked
at each load), and what it finds in its environment (an allow-list of variables, no credentials).
What is NOT guarded: the code runs in the rank's process and as its user. It can read the files that
user can read, the state directory's runtime.json with the S3 credentials of the ranks among them,
open connections, this process's memory, and /proc/PID/environ of what was started with more. A
source that is not trusted with the bucket does not belong on the allow-list; ranks that must not
read more get credentials of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.errors import (
    AccessDenied,
    CorruptData,
    InvalidInput,
    MissingTool,
    PacelineError,
    ServiceUnavailable,
    TrainingFailed,
)

if TYPE_CHECKING:
    from paceline.profile import Runtime
    from paceline.training.workload import Workload
    from paceline.wire.training import TrainJob

OURS = "paceline"  # the release is the pin; ``code_version`` is in every checkpoint
FETCH_S = 120.0  # one git command
CHECK_S = 180.0  # import, call and build, in a process of its own
MAX_FILES, MAX_BYTES = 10_000, 256 * 1024 * 1024  # of a fetched tree
SAID_CHARACTERS = 2000

_NAME = r"[A-Za-z_]\w*"
_ENTRY = rf"(?P<module>{_NAME}(?:\.{_NAME})*):(?P<function>{_NAME})"
_GIT = re.compile(rf"git\+(?P<url>(?:https|file)://[^\s#]+)@(?P<commit>[^@#]*)#{_ENTRY}")
_DIRECTORY = re.compile(rf"(?P<url>file://[^\s#@]+)(?:@sha256:(?P<digest>[0-9a-f]*))?#{_ENTRY}")
_MODULE = re.compile(rf"{_ENTRY}(?:@sha256:(?P<digest>[0-9a-f]*))?")

# What user code may find in its environment; everything else is taken away before its import.
_KEPT = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TMPDIR|LANG|LANGUAGE|LC_\w+|TZ|PWD|VIRTUAL_ENV|LD_LIBRARY_PATH"
    r"|PYTHON(PATH|HOME|HASHSEED|UNBUFFERED|DONTWRITEBYTECODE|WARNINGS|FAULTHANDLER|UTF8)"
    r"|(OMP|MKL|KMP|OPENBLAS|GLOO|NCCL|TORCH|TORCHINDUCTOR|CUDA|NVIDIA|CUBLAS|ATEN|ONEDNN)_\w+"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|PACELINE_(ATTEMPT|WORKER_ID)"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|_KEY$|_AUTH", re.IGNORECASE)


@dataclass(frozen=True)
class Task:
    """What the entrypoint is told."""

    seed: int = 0
    context: int = 256  # tokens of a row
    vocabulary: int = 256
    parameters: int = 100_000  # a wish: the profile's dial


@dataclass(frozen=True)
class CodeRef:
    """A parsed reference."""

    text: str
    kind: Literal["module", "directory", "git"]
    module: str
    function: str
    url: str = ""
    pin: str = ""  # a commit or a digest; "" only for our own modules

    @property
    def top(self) -> str:
        """Return the name of the outermost package."""
        return self.module.partition(".")[0]

    @property
    def directory(self) -> Path:
        """Return the directory of a ``file://`` reference."""
        return Path(self.url.removeprefix("file://"))


def parse(text: str) -> CodeRef:
    """Return ``text`` taken apart; raises InvalidInput where it is malformed or not pinned."""
    if found := _GIT.fullmatch(text):
        if not re.fullmatch(r"[0-9a-f]{40}", found["commit"]):
            raise _unpinned(text, found["commit"] or "no commit", "a full commit of 40 hex digits")
        if "@" in found["url"].partition("://")[2].partition("/")[0]:
            raise InvalidInput(
                "code reference carries credentials",
                wanted="a URL without a user",
                where=_where(text),
            )
        return CodeRef(
            text, "git", found["module"], found["function"], found["url"], found["commit"]
        )
    if found := _DIRECTORY.fullmatch(text):
        _require_digest(text, found["digest"], f"directory_digest({found['url']!r})")
        ref = CodeRef(text, "directory", found["module"], found["function"], found["url"])
        if not ref.directory.is_absolute():
            raise InvalidInput("code directory is not absolute", got=text, wanted="file:///…")
        return CodeRef(**(asdict(ref) | {"pin": found["digest"]}))
    if found := _MODULE.fullmatch(text):
        digest = found["digest"]
        if found["module"].partition(".")[0] != OURS or digest:
            _require_digest(text, digest, "module_digest")
        return CodeRef(text, "module", found["module"], found["function"], pin=digest or "")
    raise InvalidInput(
        "code reference cannot be read",
        got=repr(text[:200]),
        wanted="module:function@sha256:…, file:///DIRECTORY@sha256:…#module:function, or "
        "git+https://…@COMMIT#module:function",
        where="training.code_ref",
    )


def require_allowed(ref: CodeRef, sources: Sequence[str]) -> None:
    """Raise AccessDenied where ``ref`` is from none of ``sources``."""
    if any(_covers(each, ref) for each in sources):
        return
    raise AccessDenied(
        "code reference is from a source that is not allowed",
        got=ref.text,
        wanted=f"one of {', '.join(sources) or 'none'}",
        where="security.code_sources",
        do="Add the source to the profile if you trust it with what the ranks can read.",
    )


def _covers(source: str, ref: CodeRef) -> bool:
    if ref.kind == "module":
        return ref.module == source or ref.module.startswith(f"{source}.")
    if "/../" in f"{ref.url}/" or "/./" in f"{ref.url}/":
        return False
    if source.startswith("/"):
        held = Path(source).resolve()
        return ref.url.startswith("file://") and ref.directory.resolve().is_relative_to(held)
    return source.endswith("/") and "://" in source and ref.url.startswith(source)


def load(
    text: str, sources: Sequence[str], cache: Path, task: Task, *, scrub_environment: bool = True
) -> Workload:
    """Return the workload that ``text`` names, in this process and without ambient credentials.

    Raises InvalidInput (malformed, unpinned, no workload), AccessDenied (not allowed), CorruptData
    (other content than the pin), ServiceUnavailable (cannot be fetched), TrainingFailed (raised).
    """
    ref = parse(text)
    require_allowed(ref, sources)
    tree = fetch(ref, cache)
    if scrub_environment:
        scrub(os.environ)
    entry = _entry(ref, tree)
    try:
        workload = entry(task)
    except Exception as error:
        raise _raised("code reference raised", ref, error) from error
    return require_workload(workload, ref)


def fetch(ref: CodeRef, cache: Path) -> Path | None:
    """Return the directory to import ``ref`` from, its content checked; None: it is installed.

    A commit, or a directory, is copied into ``cache`` once, whole or not at all, and is checked
    against its digest each time.
    """
    if ref.kind == "module":
        if ref.pin and (got := module_digest(ref.module)) != ref.pin:
            raise _changed(ref, got)
        return None
    name = hashlib.sha256(f"{ref.url}@{ref.pin}".encode()).hexdigest()
    tree, seal = cache / name, cache / f"{name}.sha256"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks of one node fetch once; git has a deadline
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


def scrub(environment: MutableMapping[str, str]) -> list[str]:
    """Remove every variable that user code has no need of; return their names.

    Libraries that were imported before keep what they have read.
    """
    removed = [name for name in environment if not _KEPT.fullmatch(name) or _SECRET.search(name)]
    for name in removed:
        del environment[name]
    return removed


def require_workload(found: Any, ref: CodeRef) -> Workload:
    """Return ``found`` where it is a workload; raises InvalidInput where it is not."""
    from paceline.training.workload import Workload

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
            where=_where(ref.text),
        )
    return found


def check(
    text: str, sources: Sequence[str], cache: Path, task: Task, *, deadline_s: float = CHECK_S
) -> None:
    """Load the reference and build its model in a process of its own, before any rank starts.

    Raises what ``load`` raises, with the same fields. The process gets no ambient credentials.
    """
    parse(text)
    require_allowed(parse(text), sources)
    environment = dict(os.environ)
    scrub(environment)
    asked = {"text": text, "sources": list(sources), "cache": str(cache), "task": asdict(task)}
    command = [sys.executable, "-m", "paceline.training.code_ref"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            env=environment,
            timeout=deadline_s,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as error:
        raise TrainingFailed(
            "code reference does not come to an end",
            got=f"nothing within {deadline_s:.0f} s",
            where=_where(text),
        ) from error
    if done.returncode == 0:
        return
    try:
        said = json.loads(done.stdout.splitlines()[-1])
        kind = _KINDS[said["code"]]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        tail = done.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise TrainingFailed(
            "code reference ended its process",
            got=f"exit code {done.returncode}: {tail[0][:SAID_CHARACTERS]}",
            where=_where(text),
        ) from error
    raise kind(
        said["what"], got=said["got"], wanted=said["wanted"], where=said["where"], do=said["do"]
    )


def require_code(job: TrainJob, runtime: Runtime, vocabulary: int) -> None:
    """Check the job's own code before any rank is started; see ``check``."""
    if not job.settings.code_ref:
        return
    task = Task(
        seed=job.settings.seed,
        context=runtime.profile.model.context,
        vocabulary=vocabulary,
        parameters=runtime.profile.model.parameters,
    )
    sources = runtime.profile.security.code_sources
    check(job.settings.code_ref, sources, runtime.state_dir / "code", task)


_KINDS: dict[str, type[PacelineError]] = {
    each.__name__: each
    for each in (
        AccessDenied, CorruptData, InvalidInput, MissingTool, ServiceUnavailable, TrainingFailed
    )
}  # fmt: skip


def main() -> int:
    """Check the reference on standard input; the last line of output says what is wrong."""
    asked = json.loads(sys.stdin.readline())
    try:
        workload = load(
            asked["text"], asked["sources"], Path(asked["cache"]), Task(**asked["task"])
        )
        _build(workload, parse(asked["text"]))
    except PacelineError as error:
        said = {"code": error.code, "what": error.what, "do": error.do} | {
            name: None if value is None else str(value)[:SAID_CHARACTERS]
            for name, value in (
                ("got", error.got),
                ("wanted", error.wanted),
                ("where", error.where),
            )
        }
        sys.stdout.write("\n" + json.dumps(said) + "\n")
        return error.exit_code
    return 0


def _build(workload: Workload, ref: CodeRef) -> None:
    from torch import nn

    try:
        model = workload.build()
    except Exception as error:
        raise _raised("code reference raised while it built its model", ref, error) from error
    if not isinstance(model, nn.Module) or not any(True for _ in model.parameters()):
        raise InvalidInput(
            "code reference builds no model",
            got=type(model).__name__,
            wanted="a torch.nn.Module with parameters",
            where=_where(ref.text),
        )


# ---------------------------------------------------------------------------------------- digests


def tree_digest(directory: Path) -> str:
    """Return the SHA-256 over names and bytes of all files below ``directory``, caches apart."""
    found = hashlib.sha256()
    for path in _files(directory):
        data = path.read_bytes()
        found.update(f"{path.relative_to(directory).as_posix()}\0{len(data)}\0".encode())
        found.update(data)
    return found.hexdigest()


def module_digest(module: str) -> str:
    """Return the digest of the installed package (or single file) that ``module`` is part of.

    Nothing of it is imported. Raises InvalidInput where it is not installed as plain files.
    """
    top = module.partition(".")[0]
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise InvalidInput(
            "module of the code reference is not installed",
            got=top,
            wanted="a package of .py files",
        )
    origin = Path(spec.origin)
    if spec.submodule_search_locations is None:
        return hashlib.sha256(origin.read_bytes()).hexdigest()
    return tree_digest(origin.parent)


def _files(directory: Path) -> Iterator[Path]:
    count = size = 0
    for path in sorted(directory.rglob("*")):
        if "__pycache__" in path.parts or (path.is_dir() and not path.is_symlink()):
            continue
        if path.is_symlink() or not path.is_file():
            raise InvalidInput(
                "code holds something not a plain file", got=path.name, where=directory
            )
        count, size = count + 1, size + path.stat().st_size
        if count > MAX_FILES or size > MAX_BYTES:
            raise InvalidInput(
                "code is too large",
                wanted=f"≤ {MAX_FILES} files, ≤ {MAX_BYTES} bytes",
                where=directory,
            )
        yield path


# ------------------------------------------------------------------------------- fetch and import


def _copy(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise InvalidInput("code directory is not there", got="nothing", where=source)
    for path in _files(source):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    if not target.exists():
        raise InvalidInput("code directory is empty", where=source)


def _clone(ref: CodeRef, target: Path) -> None:
    """Put the commit's files into ``target``: no credentials, hooks, submodules or helpers."""
    if shutil.which("git") is None:
        raise MissingTool("git is not installed", wanted="git", do="Install it on every node.")
    target.mkdir(parents=True)
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    environment = kept | {
        "HOME": str(target.parent),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "/bin/false",
        "GIT_ALLOW_PROTOCOL": ref.url.partition("://")[0],
    }
    options = [
        "-c",
        "core.hooksPath=/dev/null",
        "-c",
        "core.symlinks=false",
        "-c",
        "safe.directory=*",
    ]

    def git(*words: str) -> str:
        try:
            done = subprocess.run(
                ["git", *options, "-C", str(target), *words],
                capture_output=True,
                text=True,
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

    git("init", "-q")
    git("fetch", "-q", "--depth", "1", "--no-tags", "--no-recurse-submodules", ref.url, ref.pin)
    git("checkout", "-q", "--detach", ref.pin)
    if (got := git("rev-parse", "HEAD")) != ref.pin:
        raise CorruptData("another commit came", got=got, wanted=ref.pin, where=ref.url)
    shutil.rmtree(target / ".git")


def _entry(ref: CodeRef, tree: Path | None) -> Any:
    if tree is not None:
        _require_own_name(ref, tree)
        if str(tree) not in sys.path:
            sys.path.append(str(tree))  # at the end: it hides nothing that is installed
        importlib.invalidate_caches()
    try:
        with _no_bytecode():
            module = importlib.import_module(ref.module)
        entry = getattr(module, ref.function)
    except AttributeError as error:
        raise InvalidInput(
            "code reference names no function", got=ref.function, where=_where(ref.text)
        ) from error
    except Exception as error:
        raise _raised("code reference cannot be imported", ref, error) from error
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
            "code reference names no function", got=type(entry).__name__, where=_where(ref.text)
        )
    return entry


def _require_own_name(ref: CodeRef, tree: Path) -> None:
    """Refuse a name that is taken before anything of that name is run."""
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
            where=_where(ref.text),
        )


@contextlib.contextmanager
def _no_bytecode() -> Iterator[None]:
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def _raised(what: str, ref: CodeRef, error: Exception) -> TrainingFailed:
    return TrainingFailed(
        what,
        got=f"{type(error).__name__}: {error}"[:SAID_CHARACTERS],
        where=_where(ref.text),
        do="Mend the code, pin it anew, and start the job again.",
    )


def _require_digest(text: str, digest: str | None, how: str) -> None:
    if digest is None or not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise _unpinned(text, digest or "no digest", f"@sha256: and 64 hex digits ({how})")


def _unpinned(text: str, got: str, wanted: str) -> InvalidInput:
    return InvalidInput(
        "code reference is not pinned",
        got=got,
        wanted=wanted,
        where=_where(text),
        do="`python -m paceline.training.code_digest MODULE_OR_DIRECTORY` prints a digest.",
    )


def _changed(ref: CodeRef, got: str) -> CorruptData:
    return CorruptData(
        "code is not what the reference is pinned to",
        got=f"sha256:{got}",
        wanted=f"sha256:{ref.pin}",
        where=ref.url or ref.module,
    )


def _where(text: str) -> str:
    return f"training.code_ref {text[:300]}"


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # user code may have left threads
