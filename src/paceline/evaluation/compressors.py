"""gzip and xz at their highest level, each document on its own: what anybody has without training.

Their headers and start-up cost are part of the figure; that is what a file of that size costs.
"""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Callable, Mapping


def _gzip(text: bytes) -> bytes:
    return gzip.compress(text, compresslevel=9, mtime=0)


def _xz(text: bytes) -> bytes:
    return lzma.compress(text, preset=9)


COMPRESSORS: Mapping[str, Callable[[bytes], bytes]] = {"gzip": _gzip, "xz": _xz}


def compressed_bits(name: str, text: bytes) -> float:
    """Return the size of ``text`` in bits after the compressor called ``name``."""
    return 8.0 * len(COMPRESSORS[name](text))
