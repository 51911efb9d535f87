"""Parse a code reference, check its source against the allow-list, and compute its digest.

Imports and runs none of the referenced code.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from paceline.config import Profile, module_allowed, with_overrides
from paceline.errors import AccessDenied, InvalidInput

DIAL = "training.code_ref"  # the setting that holds a reference
OPTIMIZER = "training.optimizer_ref"  # and another one

_NAME = r"[A-Za-z_]\w*"
_ENTRY = rf"(?P<module>{_NAME}(?:\.{_NAME})*):(?P<function>{_NAME})"
_FILE = r"file://[^#\x00-\x1f\x7f]+"  # other letters may stand there percent-encoded, too
_GIT = re.compile(rf"git\+(?P<url>https://[^\s#]+|{_FILE})@(?P<commit>[^@#]*)#{_ENTRY}")
_DIRECTORY = re.compile(rf"(?P<url>{_FILE}?)(?:@sha256:(?P<digest>[0-9a-f]*))?#{_ENTRY}")
_MODULE = re.compile(rf"{_ENTRY}(?:@sha256:(?P<digest>[0-9a-f]*))?")


@dataclass(frozen=True)
class CodeRef:
    """A parsed reference."""

    text: str
    kind: Literal["module", "directory", "git"]
    module: str
    function: str
    url: str = ""
    pin: str = ""  # a commit or a digest
    dial: str = DIAL  # the setting that holds it

    @property
    def top(self) -> str:
        """Return the name of the outermost package."""
        return self.module.partition(".")[0]

    @property
    def where(self) -> str:
        """Return the reference as an error message names it."""
        return f"{self.dial} {self.text[:300]}"

    @property
    def directory(self) -> Path:
        """Return the directory of a ``file://`` reference."""
        return Path(unquote(self.url.removeprefix("file://")))


def parse(text: str, dial: str = DIAL) -> CodeRef:
    """Return the parsed reference; raises InvalidInput where it is malformed or not pinned."""
    where = f"{dial} {text[:300]}"
    if found := _GIT.fullmatch(text):
        if not re.fullmatch(r"[0-9a-f]{40}", found["commit"]):
            raise _unpinned(where, found["commit"] or "no commit", "a full commit of 40 hex digits")
        if "@" in found["url"].partition("://")[2].partition("/")[0]:
            raise InvalidInput(
                "code reference carries credentials",
                wanted="a URL without a user",
                where=where,
            )
        names = found["module"], found["function"], found["url"], found["commit"]
        return _with_path(CodeRef(text, "git", *names, dial=dial))
    if found := _DIRECTORY.fullmatch(text):
        _require_digest(where, found["digest"], f"directory_digest({found['url']!r})")
        names = found["module"], found["function"], found["url"], found["digest"]
        return _with_path(CodeRef(text, "directory", *names, dial=dial))
    if found := _MODULE.fullmatch(text):
        _require_digest(where, found["digest"], "module_digest")
        names = found["module"], found["function"], "", found["digest"]
        return CodeRef(text, "module", *names, dial=dial)
    raise InvalidInput(
        "code reference cannot be read",
        got=repr(text[:200]),
        wanted="module:function@sha256:…, file:///DIRECTORY@sha256:…#module:function, or "
        "git+https://…@COMMIT#module:function",
        where=dial,
    )


def _with_path(ref: CodeRef) -> CodeRef:
    """Return ``ref``; raises InvalidInput for a file:// URL with a host, which git would ignore."""
    if ref.url.startswith("file://"):
        path = str(ref.directory)
        if not ref.directory.is_absolute() or not path.isprintable():
            wanted = "file:///… without control characters"
            raise InvalidInput("code directory is not absolute", got=repr(ref.text), wanted=wanted)
    return ref


def require_allowed(ref: CodeRef, sources: Sequence[str]) -> None:
    """Raise AccessDenied unless one of ``sources`` covers ``ref``."""
    if any(_covers(each, ref) for each in sources):
        return
    raise AccessDenied(
        "code reference is from a source that is not allowed",
        got=ref.where,
        wanted=f"one of {', '.join(sources) or 'none'}",
        where="security.code_sources",
        do="Add the source to the profile if you trust it with what the ranks can read.",
    )


def with_code(profile: Profile, code_ref: str = "", optimizer_ref: str = "") -> Profile:
    """Return ``profile`` with a training's own code, "" being the profile's.

    Raises AccessDenied for code that the profile does not allow, InvalidInput for a reference that
    is not pinned, InvalidProfile where the other settings have no place for it.
    """
    given = {dial: text for dial, text in ((DIAL, code_ref), (OPTIMIZER, optimizer_ref)) if text}
    for dial, text in given.items():
        require_allowed(parse(text, dial), profile.security.code_sources)
    return with_overrides(profile, given) if given else profile


def _covers(source: str, ref: CodeRef) -> bool:
    if ref.kind == "module":
        return module_allowed(ref.module, (source,))
    # git and servers decode %2e%2e before they follow it
    if any(part in (".", "..") for part in unquote(ref.url).split("/")):
        return False
    if source.startswith(("/", "file:///")):
        path = source if source.startswith("/") else unquote(source.removeprefix("file://"))
        held = Path(path).resolve()
        return ref.url.startswith("file://") and ref.directory.resolve().is_relative_to(held)
    return "://" in source and f"{ref.url}/".startswith(f"{source.rstrip('/')}/")


def _require_digest(where: str, digest: str | None, how: str) -> None:
    if digest is None or not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise _unpinned(where, digest or "no digest", f"@sha256: and 64 hex digits ({how})")


def _unpinned(where: str, got: str, wanted: str) -> InvalidInput:
    return InvalidInput(
        "code reference is not pinned",
        got=got,
        wanted=wanted,
        where=where,
        do="`python -m paceline.training.code_digest MODULE_OR_DIRECTORY` prints a digest.",
    )


# Digests that pin code: of a directory's files, or of an installed module.

MAX_FILES, MAX_BYTES = 10_000, 256 * 1024 * 1024  # of a tree


def tree_digest(directory: Path) -> str:
    """Return the SHA-256 over names and bytes of all files below ``directory``, without caches."""
    found = hashlib.sha256()
    for path in files_of(directory):
        data = path.read_bytes()
        found.update(f"{path.relative_to(directory).as_posix()}\0{len(data)}\0".encode())
        found.update(data)
    return found.hexdigest()


def module_digest(module: str) -> str:
    """Return the digest of the installed package (or single file) that contains ``module``.

    Imports none of it. Raises InvalidInput where it is not installed as plain files.
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


def files_of(directory: Path) -> Iterator[Path]:
    """Yield the files below ``directory`` in order, without caches; raises InvalidInput for links,
    devices, and more than MAX_FILES files or MAX_BYTES bytes."""
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
