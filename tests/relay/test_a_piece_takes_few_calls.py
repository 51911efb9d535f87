"""The hot path is short: what one piece costs the receiving thread in Python calls and files."""

from __future__ import annotations

import threading
from pathlib import Path
from types import FrameType

from paceline.schemas import Source
from tests.relay.kit import DEPLOYMENT, lanes, manifest_of, worker
from tests.support.local_fleet import LocalFleet

PIECES = 48
PIECE_BYTES = 128 * 1024  # received as one block
MAX_CALLS = 35  # 34 where each read brings one piece, 19 where it brings two or more
MAX_FILES = 8  # of this package, over which they are spread


def test_a_piece_takes_few_calls(tmp_path: Path) -> None:
    # A busy machine delivers a piece in more reads: the run with the fewest calls counts.
    runs = [traced(tmp_path / str(number)) for number in range(3)]
    for _, files in runs:
        assert len(files) <= MAX_FILES, sorted(files)
    assert min(calls for calls, _ in runs) <= MAX_CALLS


def traced(directory: Path) -> tuple[float, set[str]]:
    """Return the calls a piece on the receiving thread, and the files of those calls."""
    model = directory / "model"
    model.mkdir(parents=True)
    (model / "weights.bin").write_bytes(bytes(range(256)) * (PIECES * PIECE_BYTES // 256))
    manifest = manifest_of(model, piece_bytes=PIECE_BYTES, chunk_bytes=4 * PIECE_BYTES)
    calls: list[tuple[str, str]] = []

    def trace(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and threading.current_thread().name.startswith("pull-"):
            calls.append((frame.f_code.co_filename, frame.f_code.co_name))

    with LocalFleet(directory / "nodes", ["first", "second"]) as fleet:
        source = Source(kind="origin", url=str(model))
        fleet.deploy(manifest, {"first": lanes("first", manifest, source)})
        fleet.receipts(DEPLOYMENT, ["first"])
        peer = worker("first", fleet.addresses["first"])
        threading.setprofile(trace)
        try:
            fleet.deploy(manifest, {"second": lanes("second", manifest, peer, source)})
            fleet.receipts(DEPLOYMENT, ["second"])
        finally:
            threading.setprofile(None)
    frames = [at for at, (_, name) in enumerate(calls) if name == "begin_piece"]
    steady = calls[frames[len(frames) // 4] : frames[3 * len(frames) // 4]]
    pieces = 3 * len(frames) // 4 - len(frames) // 4
    files = {file for file, _ in steady if "paceline" in Path(file).parts}
    assert pieces > PIECES // 3, "the middle half of all frames are pieces"
    return len(steady) / pieces, files
