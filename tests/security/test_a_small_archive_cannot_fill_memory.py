"""A few bytes of an archive that stand for gigabytes end as a named error or a sample left out, and
the reader's memory stays below 256 MB."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.security.archives import block, header, npy, numbers

MEMORY_MB = 256
READER_MB = 1024 + 256  # of the process that decodes Parquet, with its libraries
MB = 1024 * 1024
PLAIN = [header("a.txt", 3), block(b"one")]
END = b"\0" * 1024

READ = """
import json, resource, sys
from pathlib import Path
from paceline.data.formats import Fields, UnusableSample, open_reader
from paceline.errors import InvalidInput

found = []
with open_reader(sys.argv[1]) as read:
    for path in sys.argv[2:]:
        samples, left_out, error = [], [], None
        try:
            for each in read(Path(path), "all", Fields()):
                if isinstance(each, UnusableSample):
                    left_out = [*left_out, each.reason][-50:]
                else:
                    samples = [*samples, each.key][-50:]
        except InvalidInput as refused:
            error = str(refused)
        found.append([samples, left_out, error])
# RUSAGE_SELF would count what the process that started this one had
used = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
reader = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps([found, used // 1024, reader // 1024]))
"""


def read(*paths: Path, format_: str = "tar") -> list[tuple[list[str], list[str], str | None]]:
    """What a process of its own finds in each of the files; its memory is checked."""
    ended = subprocess.run(
        [sys.executable, "-c", READ, format_, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    found, used_mb, reader_mb = json.loads(ended.stdout)
    assert used_mb < MEMORY_MB, f"{used_mb} MB for {[each.stat().st_size for each in paths]} bytes"
    assert reader_mb < READER_MB
    return [(samples, left_out, error) for samples, left_out, error in found]


ZEROS = gzip.compress(b"\0" * MB, 1)


def packed(path: Path, *parts: bytes | int) -> Path:
    """A gzip file of these parts; a number is so many MB of zeros, each a stream of its own."""
    path.write_bytes(
        b"".join(
            ZEROS * part if isinstance(part, int) else gzip.compress(part, 1) for part in parts
        )
    )
    return path


def test_long_headers_are_passed_over_and_their_members_left_out(tmp_path: Path) -> None:
    size, parts = 200 * MB, []
    for kind in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE):  # about the member that follows
        parts += [header("@LongLink", size, kind), 200, header("b.txt", 1), block(b"b"), *PLAIN]
    for kind in (tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE):  # that no sample needs
        parts += [header("g", size, kind), 200, header("c.txt", 1), block(b"c"), *PLAIN]
    ((samples, left_out, error),) = read(packed(tmp_path / "all.tar.gz", *parts, END))
    assert (samples, error) == (["a", "a", "c", "a", "c", "a"], None)
    assert left_out == [f"a header of {size} bytes, at most {MB} wanted"] * 2


def test_headers_of_headers_and_of_sparse_files_take_little_memory_and_time(
    tmp_path: Path,
) -> None:
    hole = bytearray(header("s.npy", 0, tarfile.GNUTYPE_SPARSE))
    hole[482] = 1  # its map goes on
    hole[483:495] = b"\x80" + (2**40).to_bytes(11)  # what it would be on a disk
    hole[148:156] = b" " * 8
    hole[148:156] = b"%06o\0 " % sum(hole)
    entry = (b"00000001000\0" * 42).ljust(512, b"\0")
    more, last = bytearray(entry), bytearray(entry)
    more[504], last[504] = 1, 0
    sparse = packed(
        tmp_path / "sparse.tar.gz", bytes(hole), bytes(more) * 200_000, bytes(last), *PLAIN, END
    )
    one = header("@LongLink", 3, tarfile.GNUTYPE_LONGNAME) + block(b"n\0\0")
    deep = packed(tmp_path / "deep.tar.gz", one * 20_000, *PLAIN, END)
    digits = header("p", MB, tarfile.XHDTYPE) + b"1" * MB
    records = packed(tmp_path / "records.tar.gz", *[digits, *PLAIN] * 100, END)
    of_sparse, of_deep, of_records = read(sparse, deep, records)
    assert (of_sparse[0], of_sparse[2]) == (["a"], None)
    assert "sparse" in of_sparse[1][0]
    assert of_deep == ([], ["a member without extension"], None)
    assert of_records[2] is None  # quadratic: minutes for each
    assert of_records[1][0] == "PAX records: no length"


MEMBERS = {
    "lists.json": lambda: b"[" + b"[]," * (21 * MB) + b"[]]",
    "wide.json": lambda: b'"' + "\U0001f600".encode() + b"x" * (23 * MB) + b'"',
    "columns.npy": lambda: npy(
        numbers(shape=f"(4, {4 * MB - 64})", order="True"), b"\0" * (64 * MB - 999)
    ),
    "over.bin": lambda: b"\0" * (65 * MB),
}


def test_a_member_that_compresses_well_takes_no_more_than_its_sample(tmp_path: Path) -> None:
    paths = []
    for name, make in MEMBERS.items():
        body = make()
        its = header(name, len(body)), block(body), *PLAIN, END
        paths.append(packed(tmp_path / f"{name}.tar.gz", *its))
        assert paths[-1].stat().st_size < MB
    for samples, left_out, error in read(*paths):
        assert error is None
        assert samples[-1] == "a"
        assert len(samples) + len(left_out) == 2


def test_an_archive_that_grows_without_end_is_refused_by_name(tmp_path: Path) -> None:
    path, zeros = tmp_path / "all.tar.gz", b"\0" * MB
    # streams one after another: of zeros, the same stream again and again
    head, step = gzip.compress(header("a.bin", 2**33)), gzip.compress(zeros * 16)
    path.write_bytes(head + step * 32)
    assert path.stat().st_size < 600_000
    ((samples, left_out, error),) = read(path)
    assert (samples, left_out) == ([], [])
    assert error is not None
    assert "grows to more than 256 times its size" in error


def test_a_dictionary_of_parquet_that_stands_for_gigabytes_is_bounded(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, text in (
        ("repeats", "x" * (16 * MB)),
        ("random", rng.integers(33, 126, 12 * MB, dtype=np.uint8).tobytes().decode()),
    ):
        column = pa.DictionaryArray.from_arrays(pa.array([0] * 40, pa.int32()), pa.array([text]))
        pq.write_table(
            pa.table({"text": column}), tmp_path / name,
            dictionary_pagesize_limit=1 << 30, store_schema=False,
        )  # fmt: skip
    footer = tmp_path / "footer"
    footer.write_bytes(b"PAR1" + b"\0" * 100 + (2**32 - 1).to_bytes(4, "little") + b"PAR1")
    paths = (tmp_path / "repeats", tmp_path / "random", footer)
    repeats, random, claims = read(*paths, format_="parquet")
    assert repeats[0] == random[0] == []
    assert "grows to more than" in str(repeats[2])
    assert random[2] is None
    assert set(random[1]) == {"too large: a text has at most 8 MiB, cut it up (JSONL)"}
    assert "a footer of 4294967295 bytes" in str(claims[2])


LIMITED = """
import sys
from pathlib import Path
from paceline.data.formats import UnusableSample, parquet
parquet.limit_memory(160 << 20)
for each in parquet.read_parquet(Path(sys.argv[1]), "all", parquet.Fields()):
    print(each.key, "left out" if isinstance(each, UnusableSample) else "read")
"""


def test_a_row_of_parquet_that_takes_too_much_memory_costs_its_row_group(tmp_path: Path) -> None:
    deep = pa.ListArray.from_arrays(
        pa.array([0, 1, 8_000_000, 8_000_001], pa.int32()),
        pa.ListArray.from_arrays(
            pa.array(np.arange(8_000_002, dtype=np.int32)),
            pa.array(np.zeros(8_000_001, dtype=np.int8)),
        ),
    )
    path = tmp_path / "all.parquet"
    table = pa.table({"key": ["a", "b", "c"], "x": deep})
    with pq.ParquetWriter(path, table.schema) as writer:
        writer.write_table(table)
        writer.write_table(table.slice(0, 1))
    env = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=env,
    )
    wanted = ["a read", "all:1 left out", "all:2 left out", "a read"]
    assert ended.stdout.splitlines() == wanted, ended.stderr[-2000:]


def test_a_line_without_an_end_is_passed_over_or_refused_by_name(tmp_path: Path) -> None:
    hole, packed_lines = tmp_path / "all.jsonl", tmp_path / "all.jsonl.gz"
    with hole.open("wb") as file:
        file.truncate(200 * MB)
        file.seek(0, 2)
        file.write(b'\n{"key": "a", "text": "one"}\n')
    line, zeros = b'{"key": "a", "text": "one"}\n', gzip.compress(b"\0" * (16 * MB))
    packed_lines.write_bytes(gzip.compress(line) + zeros * 40)
    whole, endless = read(hole, packed_lines, format_="jsonl")
    assert (whole[0], whole[2]) == (["a"], None)
    assert whole[1][0].startswith("too large")
    assert endless[0] == ["a"]
    assert "grows to more than 256 times its size" in str(endless[2])
