"""Sanitise text from other processes for errors, log lines, records and terminals.

Call ``printable`` where such text enters the process; ``OneLine`` is the formatter of all logs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

LONGEST = 4000  # characters of one value in an error message
# Everything before the ``@`` of an HTTP URL (tokens stand alone there, or as the user), and what
# follows the user's name in any other. A password may hold an ``@``. Signatures of signed URLs.
_PASSWORD = re.compile(
    r"""((?:https?|oci)://)[^\s/?#"'<>]+@|(://[^\s/:@?#"'<>]*):[^\s/"'<>]+@"""
    r"""|([?&](?:x-(?:amz|goog)-(?:signature|security-token)|signature|sig)=)[^\s&#"'<>]+""",
    re.IGNORECASE,
)

# Access tokens as their issuers shape them, so that they can be found: ours, Hugging Face, GitHub,
# GitLab, AWS, Google, Slack, OpenAI and Anthropic, signed JSON (JWT), and private keys.
_TOKEN = re.compile(
    r"""(?<![A-Za-z0-9])(?:pl_[0-9a-f]{16}_[\w-]{32,}|hf_[A-Za-z0-9]{30,}|gh[opsur]_[A-Za-z0-9]{30,}"""
    r"""|github_pat_\w{30,}|glpat-[\w-]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])|AIza[\w-]{35}"""
    r"""|xox[a-z]-[0-9][\w-]{15,}|sk-(?:(?:proj|ant)-[\w-]{20,}|[A-Za-z0-9]{32,})"""
    r"""|eyJ[\w-]{10,200}\.eyJ[\w.-]{10,})|-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?s:.*)"""
)

_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b")


def printable(text: str, longest: int = LONGEST) -> str:
    r"""Return ``text`` on one line of at most ``longest`` characters, every character visible.

    Control characters, bidi overrides, line separators and lone surrogates become escapes such as
    ``\x1b``. The function is idempotent.
    """
    if len(text) <= longest and text.isprintable():
        return text
    cut = text[: longest + 1]  # an escape is never shorter than its character
    shown = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in cut
    )
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def without_passwords(text: str) -> str:
    """Return ``text`` with passwords, tokens and signatures of its URLs replaced by asterisks, and
    what ``has_token`` finds."""
    return _TOKEN.sub("***", _PASSWORD.sub(_hidden, text) if "://" in text else text)


def _hidden(found: re.Match[str]) -> str:
    if found[3]:
        return f"{found[3]}***"
    return f"{found[1]}***@" if found[1] else f"{found[2]}:***@"


def has_password(text: str) -> bool:
    """Return whether a URL in ``text`` has a password, a token before its host, or a signature."""
    return "://" in text and _PASSWORD.search(text) is not None


def has_token(text: str) -> bool:
    """Return whether ``text`` has an access token of a well-known shape, or a private key."""
    return _TOKEN.search(text) is not None


def shortened(names: Sequence[str], most: int = 10) -> str:
    """Return ``names`` joined by commas; beyond ``most``, how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def short_digests(text: object) -> str:
    """Return ``text`` with each digest of 32 hex digits or more cut to its first 12."""
    return _DIGEST.sub(r"\1", str(text))


def indented(text: str) -> str:
    """Return ``text`` with each line made ``printable`` and indented by two spaces.

    For tracebacks: the indentation keeps a line from being mistaken for a log event.
    """
    return "\n".join(f"  {printable(line.expandtabs())}" for line in text.split("\n"))


def log_to_stderr(level: int | str, form: str) -> None:
    """Configure this process to log to standard error, one line per event."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine(form))
    logging.basicConfig(level=level, handlers=[handler])


class OneLine(logging.Formatter):
    """Log formatter that writes one line per event; line breaks in arguments are escaped, and
    passwords in URLs are left out.

    A traceback follows on lines indented by two spaces, so that none is mistaken for an event.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """Return the line with control characters escaped."""
        record.message = without_passwords(printable(record.message, 16 * LONGEST))
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802 (logging's name)
        """Return the traceback indented, with control characters escaped."""
        return without_passwords(indented(super().formatException(ei)))  # type: ignore[arg-type]
