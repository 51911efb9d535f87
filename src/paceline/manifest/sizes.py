"""Chooses the sizes of pieces and chunks from the model's size and the link's speed.

Pure arithmetic.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from paceline.errors import InvalidInput

KIB = 1024
MIB = 1024 * KIB

MIN_CHOSEN_PIECE = 64 * KIB  # a caller may request less, down to MIN_ALLOWED_PIECE
MAX_PIECE = 16 * MIB
MAX_CHOSEN_PIECE = 4 * MIB  # 1,000 hops: 3.4 s at 10 Gbps; larger only beyond half of MAX_PIECES
MIN_ALLOWED_PIECE = 1 * KIB
MIN_CHUNK = 64 * KIB
MIN_CHUNKS = 16  # enough for progress to mean something in a small model
CHUNK_SECONDS = 0.8  # 1 GB at 10 Gbps
# A line of 32 workers adds 32 x piece / link to size / link; 0.5 % of it makes piece = size / 6400.
PIECES_FOR_HALF_A_PERCENT = 32 * 200
# A piece costs about 0.2 ms of Python a hop beside its bytes: 8 hosts at 100 Mbit/s took a tenth
# less CPU with 256 KiB than with 128. Smaller ones only where a line of 8 would take 1 % longer.
CHEAP_PIECE = 256 * KIB
PIECES_FOR_EIGHT = 8 * 100
MAX_PIECES = 1 << 19  # 8 TiB; parsing any manifest stays below 256 MB
MAX_CHUNKS = 1 << 16


class Sizes(NamedTuple):
    """The piece size and the chunk size of a manifest."""

    piece_bytes: int
    chunk_bytes: int


def choose_sizes(
    total_size: int, link_mbit: float, *, piece_bytes: int = 0, chunk_bytes: int = 0
) -> Sizes:
    """Return sizes for a model of ``total_size`` bytes; a given size is kept.

    Raises InvalidInput where a given size is out of range or the two do not fit together.
    """
    if link_mbit <= 0:
        raise InvalidInput("bad link speed", got=link_mbit, wanted="more than 0 Mbit/s")
    if piece_bytes and not MIN_ALLOWED_PIECE <= piece_bytes <= MAX_PIECE:
        raise InvalidInput(
            "bad piece size",
            got=piece_bytes,
            wanted=f"{MIN_ALLOWED_PIECE} to {MAX_PIECE} bytes, or 0",
        )
    if chunk_bytes and chunk_bytes < (piece_bytes or MIN_ALLOWED_PIECE):
        raise InvalidInput(
            "bad chunk size",
            got=chunk_bytes,
            wanted=f"at least {piece_bytes or MIN_ALLOWED_PIECE} bytes",
        )
    piece = piece_bytes or _piece(total_size, chunk_bytes)
    if -(-total_size // piece) > MAX_PIECES:
        least = -(-total_size // MAX_PIECES)
        wanted = f"at most {MAX_PIECES} pieces, so {least} bytes each"
        possible = least <= MAX_PIECE
        raise InvalidInput(
            "too many pieces",
            got=f"pieces of {piece} bytes",
            wanted=wanted if possible else f"a model of at most {MAX_PIECES * MAX_PIECE} bytes",
            do="Ask for larger pieces." if possible else "Publish it as several models.",
        )
    chunk = chunk_bytes or _chunk(total_size, link_mbit, piece)
    if total_size > chunk * (MAX_CHUNKS // 2):  # a new file may end a chunk half full
        raise InvalidInput(
            "too many chunks",
            got=f"chunks of {chunk} bytes",
            wanted=f"at least {-(-total_size // (MAX_CHUNKS // 2))} bytes, or 0",
        )
    return Sizes(piece, chunk)


def _piece(total_size: int, chunk_bytes: int) -> int:
    by_cpu = max(MIN_CHOSEN_PIECE, min(CHEAP_PIECE, total_size // PIECES_FOR_EIGHT))
    wanted = max(by_cpu, total_size // PIECES_FOR_HALF_A_PERCENT)
    if chunk_bytes:
        wanted = min(wanted, chunk_bytes)
    power = 1 << (wanted.bit_length() - 1)
    most = MAX_CHOSEN_PIECE
    while total_size > most * MAX_PIECES // 2 and most < MAX_PIECE:
        most *= 2
    return min(power, most)


def _chunk(total_size: int, link_mbit: float, piece: int) -> int:
    by_link = link_mbit * 1e6 / 8 * CHUNK_SECONDS
    wanted = max(min(by_link, total_size / MIN_CHUNKS), MIN_CHUNK, piece)
    wanted = max(wanted, 2 * total_size / (MAX_CHUNKS // 2))
    return max(1, round(wanted / piece)) * piece  # whole pieces, so that only edges are ragged


# Chunk layout: where chunks begin and end in a stream of files. Pure arithmetic on sizes.
#
# One rule: a file that does not fit into the rest of a chunk begins a new one. So a chunk holds
# either whole files or part of exactly one, and the files between two that begin a chunk (a
# *strand*) can be digested independently of all others: large shards in parallel, in one pass.


class DigestRun(NamedTuple):
    """Files ``[first_file, last_file)`` and the sizes of the chunks that they fill exactly."""

    first_file: int
    last_file: int
    chunk_sizes: Sequence[int]


def chunk_layout(file_sizes: Iterable[int], piece_bytes: int, chunk_bytes: int) -> list[int]:
    """Return the sizes of the chunks of files of these sizes; ``chunk_bytes`` is at least a piece.

    Every chunk is a run of whole pieces, at least one, of at most ``chunk_bytes`` together.
    """
    whole = chunk_bytes // piece_bytes * piece_bytes
    chunks: list[int] = []
    filled = 0  # bytes of the chunk in progress
    for size in file_sizes:
        if filled and filled + size > chunk_bytes:
            chunks.append(filled)
            filled = 0
        filled += size
        while filled > chunk_bytes:  # only a file that began this chunk
            chunks.append(whole)
            filled -= whole
    return [*chunks, filled] if filled else chunks


def strands(file_sizes: Sequence[int], chunk_sizes: Sequence[int]) -> list[DigestRun]:
    """Return the strands of files and chunks of these sizes, in stream order."""
    files = list(accumulate(file_sizes, initial=0))
    chunks = list(accumulate(chunk_sizes, initial=0))
    # A strand begins where a chunk begins at a file's edge: at the first of its empty files.
    begins = [
        (file, chunk)
        for chunk, offset in enumerate(chunks[:-1])
        if files[file := bisect_left(files, offset)] == offset
    ]
    ends = [*begins[1:], (len(file_sizes), len(chunk_sizes))]
    return [
        DigestRun(file, last_file, chunk_sizes[chunk:last_chunk])
        for (file, chunk), (last_file, last_chunk) in zip(begins, ends, strict=True)
    ]
