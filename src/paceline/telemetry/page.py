"""HTML pages: the live fleet page and the API reference, with their scripts and styles.

They are served without a token and contain no data: the script asks for the token (or reads it from
the URL's fragment, which browsers never send) and calls the REST API with it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

DIRECTORY = Path(__file__).parent / "pages"
KINDS = {".css": "text/css", ".js": "text/javascript"}
# name → media type of the files that pages load
PAGE_FILES = {
    path.name: KINDS[path.suffix] for path in sorted(DIRECTORY.iterdir()) if path.suffix in KINDS
}
# Same origin only, and nothing inline: an injected script would not run, and could not send data to
# another host.
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self';"
        " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@cache
def page_text(name: str) -> str:
    """Return the text of a page ("fleet.html", "docs.html") or of a file of PAGE_FILES."""
    return (DIRECTORY / name).read_text(encoding="utf-8")
