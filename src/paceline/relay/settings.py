"""An agent's settings, refused before anything is made with them.

Their bounds are the registration's: what a coordinator would not take ends the agent at once, with
the option that was wrong, and no directory of a name that no path may hold.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InvalidInput
from paceline.wire.base import NAME

LABEL_MAX = 255
LINK_MBIT = (1e-3, 1e9)  # what plans can be made with
MOST_PORT = 65_535


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Who this agent is and where it works; raises InvalidInput."""

    state_dir: Path
    worker_id: str
    host: str = ""  # labels: where the node stands
    rack: str = ""
    zone: str = ""
    link_mbit: float | None = None  # what plans count on; None: the profile's
    limit_mbit: float | None = None  # of each direction; None: the link's if [cluster] paced; 0: no
    listen: str = "127.0.0.1:0"
    advertise: str = ""  # the host that others are told; "": the one listened on, or found out
    die_with_parent: bool = False
    warm: bool = False  # import the S3 client before somebody waits for it

    def __post_init__(self) -> None:
        if not re.fullmatch(NAME, self.worker_id):
            got = repr(self.worker_id)[:200]
            raise InvalidInput("not a worker's name", got=got, wanted=NAME, where="--worker-id")
        for label in ("host", "rack", "zone"):
            length = len(getattr(self, label))
            if length > LABEL_MAX:
                got, wanted = f"{length} characters", f"at most {LABEL_MAX}"
                raise InvalidInput(
                    "a label is too long", got=got, wanted=wanted, where=f"--{label}"
                )
        least, most = LINK_MBIT
        for option, mbit in (("link-mbit", self.link_mbit), ("limit-mbit", self.limit_mbit)):
            unlimited = option == "limit-mbit" and mbit == 0
            if mbit is not None and not (unlimited or least <= mbit <= most):
                wanted = f"{least:g} to {most:g} Mbit/s"
                raise InvalidInput("not a rate", got=mbit, wanted=wanted, where=f"--{option}")


def address_of(listen: str) -> tuple[str, int]:
    """Return host and port of ``listen``; raises InvalidInput."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > MOST_PORT:
        wanted = f"host:port, a port up to {MOST_PORT} (0: a free one)"
        raise InvalidInput("bad listen address", got=listen, wanted=wanted, where="--listen")
    return host, int(port)
