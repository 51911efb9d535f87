"""An agent whose network card flips a bit in every fifth block that it sends. For tests only."""

from __future__ import annotations

import os
from itertools import count

from paceline.cli.main import run

_sendfile, _blocks = os.sendfile, count(1)
SHARE = 5


def sendfile(out: int, descriptor: int, offset: int, length: int) -> int:
    """Send as ``os.sendfile`` does, or the same bytes with one bit flipped."""
    if next(_blocks) % SHARE:
        return _sendfile(out, descriptor, offset, length)
    block = bytearray(os.pread(descriptor, length, offset))
    block[0] ^= 1
    return os.write(out, block)


os.sendfile = sendfile

if __name__ == "__main__":
    run()
