"""The pages a browser gets: the fleet, live, and the list of calls. Each is one file, no assets.

They are served without a token and hold no data: the script asks for the token (or takes it from
the URL's fragment, which browsers never send) and reads the JSON calls with it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

# Nothing from elsewhere, nothing to elsewhere: an injected name could not even phone home.
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
    """Return the page that shows the calls of this coordinator."""
    return _page("docs.html")


@cache
def _page(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
