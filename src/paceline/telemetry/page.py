"""HTML pages: the live fleet page and the API reference; each is one file without assets.

They are served without a token and contain no data: the script asks for the token (or reads it from
the URL's fragment, which browsers never send) and calls the REST API with it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

# Same origin only: an injected script could not send data to another host.
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
        " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def fleet_page() -> str:
    """Return the page that shows workers, chunks, rates and deployments."""
    return _page("fleet.html")


def docs_page() -> str:
    """Return the page that shows the REST API of this coordinator."""
    return _page("docs.html")


@cache
def _page(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
