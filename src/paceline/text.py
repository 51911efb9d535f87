"""Text that another process wrote, made safe to show: in errors, log lines, records and terminals.

``printable`` is called where such text enters; ``OneLine`` is the formatter of this project's logs.
"""

from __future__ import annotations

import logging

LONGEST = 4000  # characters of one value in an error message


def printable(text: str, longest: int = LONGEST) -> str:
    r"""Return ``text`` on one line of at most ``longest`` characters, every character visible.

    Control characters, bidi overrides, line separators and lone surrogates become escapes such as
    ``\x1b``. Applied again, it changes nothing.
    """
    if len(text) <= longest and text.isprintable():
        return text
    cut = text[: longest + 1]  # an escape is never shorter than its character
    shown = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in cut
    )
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def quoted(text: str) -> str:
    """Return ``text`` with its lines kept, each ``printable`` and behind two spaces, so that none
    passes for a line of ours: for tracebacks.
    """
    return "\n".join(f"  {printable(line.expandtabs())}" for line in text.split("\n"))


def log_to_stderr(level: int | str, form: str) -> None:
    """Have this process log to its standard error, one line an event."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine(form))
    logging.basicConfig(level=level, handlers=[handler])


class OneLine(logging.Formatter):
    """One line an event: a line break in an argument starts no line of its own.

    A traceback follows on lines that begin with two spaces, so that none passes for an event.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """Return the line, control characters escaped."""
        record.message = printable(record.message, 16 * LONGEST)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802 (logging's name)
        """Return the traceback, indented, control characters escaped."""
        return quoted(super().formatException(ei))  # type: ignore[arg-type]
