"""A code reference taken apart, and whether its source is allowed. Reads and runs nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import AccessDenied, InvalidInput
from paceline.profile.allowed import module_allowed

DIAL = "training.code_ref"  # where a reference stands, unless said otherwise
OURS = "paceline"  # the release is the pin; ``code_version`` is in every checkpoint

_NAME = r"[A-Za-z_]\w*"
_ENTRY = rf"(?P<module>{_NAME}(?:\.{_NAME})*):(?P<function>{_NAME})"
_GIT = re.compile(rf"git\+(?P<url>(?:https|file)://[^\s#]+)@(?P<commit>[^@#]*)#{_ENTRY}")
_DIRECTORY = re.compile(rf"(?P<url>file://[^\s#@]+)(?:@sha256:(?P<digest>[0-9a-f]*))?#{_ENTRY}")
_MODULE = re.compile(rf"{_ENTRY}(?:@sha256:(?P<digest>[0-9a-f]*))?")


@dataclass(frozen=True)
class CodeRef:
    """A parsed reference."""

    text: str
    kind: Literal["module", "directory", "git"]
    module: str
    function: str
    url: str = ""
    pin: str = ""  # a commit or a digest; "" only for our own modules
    dial: str = DIAL  # of the profile

    @property
    def top(self) -> str:
        """Return the name of the outermost package."""
        return self.module.partition(".")[0]

    @property
    def where(self) -> str:
        """Return how an error names it."""
        return where(self.text, self.dial)

    @property
    def directory(self) -> Path:
        """Return the directory of a ``file://`` reference."""
        return Path(self.url.removeprefix("file://"))


def parse(text: str, dial: str = DIAL) -> CodeRef:
    """Return ``text``, as it stands in the profile's ``dial``, taken apart.

    Raises InvalidInput where it is malformed or not pinned.
    """
    if found := _GIT.fullmatch(text):
        if not re.fullmatch(r"[0-9a-f]{40}", found["commit"]):
            raise _unpinned(
                text, found["commit"] or "no commit", "a full commit of 40 hex digits", dial
            )
        if "@" in found["url"].partition("://")[2].partition("/")[0]:
            raise InvalidInput(
                "code reference carries credentials",
                wanted="a URL without a user",
                where=where(text, dial),
            )
        names = found["module"], found["function"], found["url"], found["commit"]
        return CodeRef(text, "git", *names, dial=dial)
    if found := _DIRECTORY.fullmatch(text):
        _require_digest(text, found["digest"], f"directory_digest({found['url']!r})", dial)
        names = found["module"], found["function"], found["url"], found["digest"]
        ref = CodeRef(text, "directory", *names, dial=dial)
        if not ref.directory.is_absolute():
            raise InvalidInput("code directory is not absolute", got=text, wanted="file:///…")
        return ref
    if found := _MODULE.fullmatch(text):
        digest = found["digest"]
        if found["module"].partition(".")[0] != OURS or digest:
            _require_digest(text, digest, "module_digest", dial)
        pin = digest or ""
        return CodeRef(text, "module", found["module"], found["function"], pin=pin, dial=dial)
    raise InvalidInput(
        "code reference cannot be read",
        got=repr(text[:200]),
        wanted="module:function@sha256:…, file:///DIRECTORY@sha256:…#module:function, or "
        "git+https://…@COMMIT#module:function",
        where=dial,
    )


def require_allowed(ref: CodeRef, sources: Sequence[str]) -> None:
    """Raise AccessDenied where ``ref`` is from none of ``sources``."""
    if any(_covers(each, ref) for each in sources):
        return
    raise AccessDenied(
        "code reference is from a source that is not allowed",
        got=ref.where,
        wanted=f"one of {', '.join(sources) or 'none'}",
        where="security.code_sources",
        do="Add the source to the profile if you trust it with what the ranks can read.",
    )


def _covers(source: str, ref: CodeRef) -> bool:
    if ref.kind == "module":
        return module_allowed(ref.module, (source,))
    if "/../" in f"{ref.url}/" or "/./" in f"{ref.url}/":
        return False
    if source.startswith("/"):
        held = Path(source).resolve()
        return ref.url.startswith("file://") and ref.directory.resolve().is_relative_to(held)
    return source.endswith("/") and "://" in source and ref.url.startswith(source)


def where(text: str, dial: str = DIAL) -> str:
    """Return how an error names the reference ``text``."""
    return f"{dial} {text[:300]}"


def _require_digest(text: str, digest: str | None, how: str, dial: str) -> None:
    if digest is None or not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise _unpinned(text, digest or "no digest", f"@sha256: and 64 hex digits ({how})", dial)


def _unpinned(text: str, got: str, wanted: str, dial: str) -> InvalidInput:
    return InvalidInput(
        "code reference is not pinned",
        got=got,
        wanted=wanted,
        where=where(text, dial),
        do="`python -m paceline.training.code_digest MODULE_OR_DIRECTORY` prints a digest.",
    )
