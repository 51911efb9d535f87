"""Manifests made to cost memory: each is refused by a process that stays below 256 MB."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMIT_MB = 256

SCRIPT = r"""
import sys
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
raw = made[sys.argv[1]]()
assert len(raw) <= MOST, len(raw)
try:
    parse_manifest(raw)
except InvalidManifest as error:
    print(str(error)[:200])
# Of this program alone: ru_maxrss begins with the peak of the process that started it.
status = Path("/proc/self/status").read_text()
print(int(status.partition("VmHWM:")[2].split()[0]) // 1024)
"""

CASES = [
    "the largest there may be",
    "one string of emoji",
    "many wide strings",
    "only quotes",
    "long keys",
    *(
        pytest.param(case, marks=pytest.mark.nightly)
        for case in (
            *("one long string", "one string of escapes", "escaped backslashes"),
            *("many short strings", "only backslashes", "only brackets", "only commas"),
            "one long number",
        )
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_manifest_costs_less_than_256_mb(case: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, case],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *said, peak_mb = done.stdout.splitlines()
    assert said, "every one of these is wrong somewhere"
    assert int(peak_mb) < LIMIT_MB, f"{peak_mb} MB: {said[0]}"
