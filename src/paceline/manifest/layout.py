"""Where chunks begin and end in a stream of files. Pure arithmetic on sizes.

One rule: a file that does not fit into the rest of a chunk begins a new one. So a chunk holds
either whole files or part of exactly one, and what lies between two files that begin a chunk (a
*strand*) can be digested independently of everything else: large shards in parallel, in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Strand:
    """Files ``[first_file, last_file)`` and the sizes of the chunks that they fill exactly."""

    first_file: int
    last_file: int
    chunk_sizes: list[int] = field(default_factory=list)


def lay_out(file_sizes: Sequence[int], piece_bytes: int, chunk_bytes: int) -> list[Strand]:
    """Return the strands of files of these sizes, in stream order; wants chunks of a piece or more.

    Every chunk is a run of whole pieces, at least one, of at most ``chunk_bytes`` together.
    """
    whole = chunk_bytes // piece_bytes * piece_bytes
    strands: list[Strand] = []
    filled = 0  # of the chunk in progress
    for index, size in enumerate(file_sizes):
        if filled and filled + size > chunk_bytes:
            strands[-1].chunk_sizes.append(filled)
            filled = 0
        if filled == 0:
            strands.append(Strand(index, index + 1))
        strand = strands[-1]
        strand.last_file = index + 1
        filled += size
        while filled > chunk_bytes:  # only a file that began this chunk
            strand.chunk_sizes.append(whole)
            filled -= whole
    if filled:
        strands[-1].chunk_sizes.append(filled)
    return strands
