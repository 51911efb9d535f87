"""Manifests made to cost memory: each is refused by a process that stays below 256 MB."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMIT_MB = 256

SCRIPT = r"""
import os, sys
from pathlib import Path
from paceline.errors import InvalidManifest
from paceline.manifest import MAX_MANIFEST_BYTES as MOST, Chunk, FileEntry, Manifest, parse_manifest
from paceline.manifest.sizes import MAX_PIECES
H = b"0123456789abcdef" * 4
WIDE = ('"\U0001f600%055d",' % 0).encode()

def largest():
    pieces = b",".join([b'"%064x"' % n for n in range(MAX_PIECES)])
    size = MAX_PIECES * 1024
    return (
        b'{"format":"paceline-manifest/1","model_id":"m","version":"1","total_size":%d,'
        b'"chunk_size":1073741824,"piece_size":1024,"files":[{"path":"a","size":%d,"sha256":"%s",'
        b'"pieces":[%s]}],"chunks":[{"chunk_id":0,"offset":0,"size":%d,"checksum":"%s"}],'
        b'"global_checksum":"%s"}' % (size, size, H, pieces, size, H, H)
    )

made = {
    "the largest there may be": largest,
    "one long string": lambda: b'{"format":"' + b"a" * (MOST - 20) + b'"}',
    "one string of emoji": lambda: b'{"format":"' + "\U0001f600".encode() * (4 << 20) + b'"}',
    "one string of escapes": lambda: b'{"format":"' + b"\\ud83d" * (MOST // 6 - 9) + b'"}',
    "escaped backslashes": lambda: b'{"files":[' + b'"\\\\",' * (MOST // 5 - 9) + b"0]}",
    "many short strings": lambda: b'{"files":[' + b'"ab",' * 700_000 + b'""]}',
    "many wide strings": lambda: b'{"files":[' + WIDE * 250_000 + b'""]}',
    "only quotes": lambda: b'"' * MOST,
    "only backslashes": lambda: b'"' + b"\\" * (MOST - 1),
    "only brackets": lambda: b"[" * MOST,
    "only commas": lambda: b"[" + b"0," * (MOST // 2 - 2) + b"0]",
    "one long number": lambda: b'{"total_size":' + b"9" * (MOST - 20) + b"}",
    "long keys": lambda: b'{"' + b"k" * (MOST // 2) + b'":1,"' + b"k" * (MOST // 2 - 99) + b'":1}',
}
for name in sys.argv[1:]:
    if os.fork():  # a process for each, whose peak is its own
        assert os.wait()[1] == 0, name
        continue
    raw = made[name]()
    assert len(raw) <= MOST, len(raw)
    try:
        parse_manifest(raw)
    except InvalidManifest as error:
        print(name, str(error)[:200], sep=": ")
    status = Path("/proc/self/status").read_text()
    print(int(status.partition("VmHWM:")[2].split()[0]) // 1024, flush=True)
    os._exit(0)
"""

CASES = (
    "the largest there may be",
    "one string of emoji",
    "many wide strings",
    "only quotes",
    "long keys",
)
MORE = (
    *("one long string", "one string of escapes", "escaped backslashes", "many short strings"),
    *("only backslashes", "only brackets", "only commas", "one long number"),
)


@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE, marks=pytest.mark.nightly)])
def test_a_hostile_manifest_costs_less_than_256_mb(cases: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *cases],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * len(cases), "every one of these is wrong somewhere"
    for said, peak_mb in zip(lines[::2], lines[1::2], strict=True):
        assert int(peak_mb) < LIMIT_MB, f"{peak_mb} MB: {said}"
