"""The worst input of each parser of foreign bytes: how long it takes, and how much memory.

    python -m benchmarks.parsers                          # 48 MB each, or the parser's own limit
    python -m benchmarks.parsers --bytes 1e6 --only manifest
    python -m benchmarks.parsers --case "manifest: only quotes" --bytes 1e6 --bytes 4e6 --json

Each case runs in a process of its own: memory is the peak while the parser worked, with what it
held before (interpreter, libraries, the input). ``stall`` is the longest that another thread of
the process waited meanwhile, because the parser held the interpreter. A case of which the input is
larger than the parser's limit shows what the refusal costs.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import socket
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MB = 1024 * 1024
SIZE = 48 * MB
GROWTH = 16
LONG_ENOUGH_S = 0.005  # of CPU, for the clock
H = b"0123456789abcdef" * 4


@dataclass(frozen=True)
class Case:
    """One parser and one kind of input: ``make(size)`` is given to ``parse``."""

    make: Callable[[int], Any]
    parse: Callable[[Any], object]
    most: int = SIZE  # more is what no door lets through
    small: int = 32 * 1024  # a size to compare with GROWTH times itself


CASES: dict[str, Case] = {}


def case(
    parser: str,
    parse: Callable[[Any], object],
    kinds: dict[str, Callable[[int], Any]],
    most: int = SIZE,
    small: int = 32 * 1024,
) -> None:
    """Add the cases of one parser."""
    for kind, make in kinds.items():
        CASES[f"{parser}: {kind}"] = Case(make, parse, most, min(small, most // GROWTH))


def filled(unit: bytes, before: bytes = b"", after: bytes = b"") -> Callable[[int], bytes]:
    """Return a maker of ``before``, as many ``unit`` as fit, ``after``."""
    return lambda size: before + unit * ((size - len(before) - len(after)) // len(unit)) + after


def each(unit: bytes, before: bytes = b"", after: bytes = b"") -> Callable[[int], bytes]:
    """Return a maker of units that differ: ``unit`` has a place for a number of seven digits."""

    def make(size: int) -> bytes:
        count = (size - len(before) - len(after)) // len(unit % 0)
        return before + b"".join([unit % number for number in range(count)]) + after

    return make


JSON_KINDS: dict[str, Callable[[int], bytes]] = {
    "one long string": filled(b"a", b'{"a":"', b'"}'),
    "a string without an end, of escaped quotes": filled(b'\\"', b'{"a":"'),
    "only quotes": filled(b'"'),
    "only brackets": filled(b"["),
    "closing brackets": filled(b"]"),
    "one long number": filled(b"9", b'{"a":', b"}"),
    "unique keys and one twice": each(b'"k%07d":1,', b"{", b'"z":1,"z":1}'),
    "escapes": filled(b"\\ud83d", b'{"a":"', b'"}'),
    "not UTF-8": filled(b"\xff"),
    "only spaces": filled(b" "),
}


# --- manifest ------------------------------------------------------------------------------------


def parsed_manifest(raw: bytes) -> object:
    from paceline.manifest import parse_manifest

    return parse_manifest(raw)


def a_manifest(files: bytes, total: int) -> bytes:
    return (
        b'{"format":"paceline-manifest/1","model_id":"m","version":"1","total_size":%d,'
        b'"chunk_size":1073741824,"piece_size":1024,"files":[%s],"chunks":[{"chunk_id":0,'
        b'"offset":0,"size":%d,"checksum":"%s"}],"global_checksum":"%s"}'
    ) % (total, files, total, H, H)


def files_of(path: Callable[[int], bytes], most: int = 100_000) -> Callable[[int], bytes]:
    def part(number: int) -> bytes:
        return b'{"path":"%s","size":0,"sha256":"%s","pieces":[]}' % (path(number), H)

    def make(size: int) -> bytes:
        count = min(most, (size - len(a_manifest(b"", 10**6))) // (len(part(0)) + 1))
        return a_manifest(b",".join(map(part, range(count))), count)

    return make


def many_pieces(size: int) -> bytes:
    count = min(1 << 19, size // 67)
    pieces = b",".join([b'"%064x"' % number for number in range(count)])
    file = b'{"path":"a","size":%d,"sha256":"%s","pieces":[%s]}' % (count * 1024, H, pieces)
    return a_manifest(file, count * 1024)


MARKS = ("a" + "\u0301" * 60 + "\u0316" * 60).encode()  # to be put into canonical order
case(
    "manifest",
    parsed_manifest,
    {
        **JSON_KINDS,
        "escaped quotes outside strings": filled(b'\\"'),
        "commas": filled(b"0,", b"[", b"0]"),
        "pieces": many_pieces,
        "files": files_of(lambda n: b"%06d" % n),
        "long paths": files_of(lambda n: b"%06d/" % n + b"x" * 250),
        "deep paths": files_of(lambda n: b"/".join([b"%06dxxxxxxxxxxxxxxxxxxxxxxxx" % n] * 32)),
        "paths of combining marks": lambda size: files_of(
            lambda n: b"%06d" % n + b"/".join([MARKS] * 4)
        )(min(size, 16 * MB)),
    },
)


# --- models --------------------------------------------------------------------------------------

CONFIG = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1} | {
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}


def directory_with(name: str, make: Callable[[int], bytes]) -> Callable[[int], Path]:
    def write(size: int) -> Path:
        directory = Path(tempfile.mkdtemp(prefix="paceline-parsers-"))
        (directory / "config.json").write_text(json.dumps(CONFIG))
        (directory / name).write_bytes(make(size))
        return directory

    return write


def read_config(directory: Path) -> object:
    from paceline.models import read_config as read

    return read(directory)


def read_index(directory: Path) -> object:
    from paceline.models import read_index as read

    return read(directory)


def safetensors_header(make: Callable[[int], bytes]) -> Callable[[int], Path]:
    def write(size: int) -> Path:
        from paceline.models import INDEX_FILE, ModelConfig, Transformer

        header = make(size - 8)
        directory = directory_with("w.safetensors", lambda _: struct.pack("<Q", len(header)))(0)
        with (directory / "w.safetensors").open("ab") as file:
            file.write(header)
        names = Transformer(ModelConfig(**CONFIG)).state_dict()  # type: ignore[arg-type]
        index = {"weight_map": dict.fromkeys(names, "w.safetensors")}
        (directory / INDEX_FILE).write_text(json.dumps(index))
        return directory

    return write


def load_model(directory: Path) -> object:
    from paceline.models import load_model as load

    return load(directory)


TENSORS = each(b'"t%07d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},', b"{", b'"t":{}}')
case(
    "config.json",
    read_config,
    {kind: directory_with("config.json", make) for kind, make in JSON_KINDS.items()},
    16 * MB,
)
case(
    "safetensors index",
    read_index,
    {
        kind: directory_with("model.safetensors.index.json", make)
        for kind, make in {
            "tensors": each(b'"t%07d":"a.safetensors",', b'{"weight_map":{', b'"t":"/"}}'),
            **JSON_KINDS,
        }.items()
    },
    16 * MB,
)
case(
    "safetensors header",
    load_model,
    {kind: safetensors_header(make) for kind, make in {"tensors": TENSORS, **JSON_KINDS}.items()},
)


# --- checkpoints ---------------------------------------------------------------------------------


def checkpoint_index(raw: bytes) -> object:
    from paceline.training.checkpoint import Index

    return Index.model_validate_json(raw)


def checkpoint_commit(raw: bytes) -> object:
    from paceline.training.checkpoint import Commit

    return Commit.model_validate_json(raw)


def exchanged_layout(raw: bytes) -> object:
    from paceline.training.checkpoint import from_bytes

    return from_bytes(raw)


STORED = b'"t%07d":{"dtype":"F32","shape":[1],"chunks":[{"file":"a","offsets":[0],"sizes":[1]}]},'
case(
    "checkpoint index",
    checkpoint_index,
    {"tensors": each(STORED, b'{"tensors":{', b'"t":{}}}'), **JSON_KINDS},
)
case("checkpoint commit", checkpoint_commit, JSON_KINDS, 16 * MB)
case(
    "checkpoint layout (exchanged)",
    exchanged_layout,
    {"one long string, compressed": lambda size: zlib.compress(b'["' + b"a" * size + b'"]')},
)


# --- data ----------------------------------------------------------------------------------------


def file_of(suffix: str, make: Callable[[int], bytes]) -> Callable[[int], Path]:
    def write(size: int) -> Path:
        path = Path(tempfile.mkdtemp(prefix="paceline-parsers-")) / f"data{suffix}"
        path.write_bytes(make(size))
        return path

    return write


def read_data(format_: Any) -> Callable[[Path], object]:
    def read(path: Path) -> object:
        from paceline.data.formats import Fields, open_reader

        with open_reader(format_) as read_format:
            return sum(1 for _ in read_format(path, "data", Fields()))

    return read


def tar_of(members: Callable[[int], Iterable[tuple[str, bytes]]]) -> Callable[[int], bytes]:
    def make(size: int) -> bytes:
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for name, body in members(size):
                info = tarfile.TarInfo(name)
                info.size = len(body)
                archive.addfile(info, io.BytesIO(body))
        return raw.getvalue()

    return make


def parquet_of(columns: Callable[[int], dict[str, list[Any]]]) -> Callable[[int], bytes]:
    def make(size: int) -> bytes:
        import pyarrow as pa
        import pyarrow.parquet as pq

        raw = io.BytesIO()
        pq.write_table(pa.table(columns(size)), raw, compression="snappy")
        return raw.getvalue()

    return make


LINE = b'{"key":"%07d","text":"a","x":1}\n'
case(
    "JSONL",
    read_data("jsonl"),
    {
        kind: file_of(".jsonl", make)
        for kind, make in {
            "lines": each(LINE),
            "empty lines": filled(b"\n"),
            "numbers": filled(b"1,", b'{"x":[', b"1]}\n"),
            **JSON_KINDS,
        }.items()
    },
)
case(
    "tar",
    read_data("tar"),
    {
        kind: file_of(".tar", make)
        for kind, make in {
            "empty members": tar_of(lambda size: ((f"{n}.txt", b"") for n in range(size // 512))),
            "members of one sample": tar_of(
                lambda size: ((f"a.{n}", b"") for n in range(size // 512))
            ),
            "a long name": tar_of(lambda size: [("a" * (size // 3) + ".txt", b"")]),
            "one large member": tar_of(lambda size: [("a.bin", bytes(size))]),
            "zeros, compressed": lambda size: gzip.compress(
                tar_of(lambda many: [("a.bin", bytes(many))])(size), 1
            ),
            "not a tar": filled(b"x"),
        }.items()
    },
    small=64 * 1024,
)
case(
    "Parquet",
    read_data("parquet"),
    {
        kind: file_of(".parquet", make)
        for kind, make in {
            "one large text": parquet_of(lambda size: {"text": ["a" * size]}),
            "rows": parquet_of(lambda size: {"text": ["a"] * (size // 8)}),
            "columns": parquet_of(lambda size: {f"c{n}": [1] for n in range(size // 8192)}),
            "not Parquet": filled(b"x"),
        }.items()
    },
    small=64 * 1024,
)


# --- the peer port -------------------------------------------------------------------------------


def frames(raw: bytes) -> object:
    from paceline.errors import InvalidFrame
    from paceline.relay.transport import HEADER, decode

    bad = 0
    for at in range(0, len(raw) - HEADER.size + 1, HEADER.size):
        try:
            decode(memoryview(raw)[at : at + HEADER.size])
        except InvalidFrame:
            bad += 1
    return bad


def hello(raw: bytes) -> object:
    from paceline.relay.transport import decode_hello

    return decode_hello(raw)


def grpc_request(raw: bytes) -> object:
    from paceline.relay.transport import decode_request

    return decode_request(raw)


def gang_frame(raw: bytes) -> object:
    from paceline.training.strategies import HEADER, FrameKind, receive

    ours, theirs = socket.socketpair()
    start = HEADER.pack(b"PLW1", FrameKind.PUSH, len(raw), 0)
    writer = threading.Thread(target=_write, args=(theirs, start + raw), daemon=True)
    writer.start()
    with ours, theirs:
        return receive(ours)


def _write(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(data)


case("frames", frames, {"random headers": os.urandom, "zeros": bytes}, small=4096)
case("hello", hello, {"a long name": filled(b"a", b"\1" * 80)}, 4096)
case("gRPC request", grpc_request, {"random": os.urandom, "zeros": bytes, "tags": filled(b"\x08")})
case("gang frame", gang_frame, JSON_KINDS, MB)


# --- REST ----------------------------------------------------------------------------------------


def body(record: str) -> Callable[[bytes], object]:
    def parse(raw: bytes) -> object:
        from paceline.schemas import calls, records

        return getattr(calls, record, getattr(records, record, None)).model_validate_json(raw)

    return parse


CREATION = b'{"model_id":"m","version":"1","source_url":"s3://b/m","target_workers":['
BEAT = b'{"worker_id":"w","status":"receiving","incarnation":1,"deployments":['
case(
    "REST: CreateDeployment",
    body("CreateDeployment"),
    {"targets": each(b'"w%07d",', CREATION, b'"w"]}'), **JSON_KINDS},
    4 * MB,
)
case(
    "REST: Heartbeat",
    body("Heartbeat"),
    {"deployments": filled(b'{"deployment_id":"d"},', BEAT, b"{}]}"), **JSON_KINDS},
    4 * MB,
)
case("REST: Receipt", body("Receipt"), JSON_KINDS, 4 * MB)
case("REST: StageRecord", body("StageRecord"), JSON_KINDS, 4 * MB)


# --- words ---------------------------------------------------------------------------------------


def token(text: bytes) -> object:
    from paceline.coordinator import TokenRegistry

    return TokenRegistry().authenticate(text.decode("latin-1"), 0.0)


def host(text: bytes) -> object:
    from paceline.api import host_of

    return host_of(text.decode("latin-1"))


def source_url(text: bytes) -> object:
    from paceline.config import Endpoints, Profile, Runtime, Secrets
    from paceline.relay import allowed_source

    runtime = Runtime(
        profile=Profile(), state_dir=Path("/x"), endpoints=Endpoints(), secrets=Secrets()
    )
    return allowed_source(text.decode("latin-1"), runtime)


def quantity(text: bytes) -> object:
    from paceline.units import size_bytes

    return size_bytes(text.decode("latin-1"))


def code_reference(text: bytes) -> object:
    from paceline.training.user_code import parse

    return parse(text.decode("latin-1"))


def version(text: bytes) -> object:
    from paceline.manifest import version_key

    return version_key(text.decode("latin-1"))


def profile(path: Path) -> object:
    from paceline.config import load_profile

    return load_profile(str(path))


URL_KINDS = {
    "one long key": filled(b"a", b"s3://bucket/"),
    "components": filled(b"a/", b"s3://bucket/"),
    "a long bucket": filled(b"a", b"s3://"),
    "a path": filled(b"a/", b"/"),
    "a path of parents": filled(b"../", b"/"),
}
TEXT_KINDS = {"digits": filled(b"1", after=b"!"), "spaces": filled(b" ", b"1", b"!")}
case("token", token, {"a long token": filled(b"a", b"pl_"), "underscores": filled(b"_")}, 32 * 1024)
case("Host header", host, {"colons": filled(b":"), "brackets": filled(b"[")}, 32 * 1024)
case("source URL", source_url, URL_KINDS)
case("quantity", quantity, TEXT_KINDS, 128 * 1024)
case(
    "code reference",
    code_reference,
    {
        "ats": filled(b"@", b"git+https://"),
        "commits": filled(b"@a", b"git+https://x", b"#"),
        "dots": filled(b"a."),
        "letters": filled(b"a"),
    },
    128 * 1024,
)
case("version", version, {"parts": filled(b"1a"), "letters": filled(b"a")}, 1024)
case(
    "profile",
    profile,
    {
        kind: file_of(".toml", make)
        for kind, make in {
            "a dotted key": filled(b"a.", after=b"a=1"),
            "dotted keys": filled(b"a." * 900 + b"a=1\n[b]\n"),
            "brackets": filled(b"[", b"a="),
            "one long number": filled(b"9", b"a="),
            "tables": each(b"[t%07d]\n"),
            "arrays of tables": filled(b"[[a]]\nb=1\n"),
            "a string without an end": filled(b'\\"', b'a="'),
            "an inline table": each(b"k%07d.a=1,", b"a={", b"b=1}"),
        }.items()
    },
    SIZE,
    12 * 1024,
)


# --- measuring -----------------------------------------------------------------------------------


def one(name: str, sizes: list[int], *, stall: bool) -> list[dict[str, Any]]:
    """Return what the case costs at each size; CPU time is the least of three, each long enough
    for the clock."""
    found, chosen = [], CASES[name]
    _said(chosen, chosen.make(min(chosen.small, *sizes)))  # imports, and what a library makes once
    for size in sizes:
        made = chosen.make(min(size, chosen.most))
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins now
        began, waited = time.monotonic(), [0.0]
        with _ticking(waited) if stall else contextlib.nullcontext():
            said = _said(chosen, made)
        seconds = time.monotonic() - began
        status = Path("/proc/self/status").read_text()
        costs = [] if stall else [_cpu_s(chosen, made) for _ in range(3)]
        found.append(
            {
                "case": name,
                "bytes": made.stat().st_size if isinstance(made, Path) and made.is_file()
                else len(made) if isinstance(made, bytes) else min(size, chosen.most),
                "seconds": round(seconds, 4),
                "stall_s": round(waited[0], 4),
                "cpu_s": min(costs, default=0.0),
                "peak_mb": int(status.partition("VmHWM:")[2].split()[0]) // 1024,
                "said": said[:100],
            }
        )  # fmt: skip
    return found


def _said(chosen: Case, made: Any) -> str:
    """Parse, and return the error that it ends by."""
    try:
        chosen.parse(made)
    except Exception as error:  # noqa: BLE001 (whatever it ends by is part of the table)
        count = getattr(error, "error_count", None)  # pydantic's: the text of all takes longer
        return f"{type(error).__name__}: {count() if count else error}"
    return "accepted"


def _cpu_s(chosen: Case, made: Any) -> float:
    times, began = 0, time.process_time()
    while (spent := time.process_time() - began) < LONG_ENOUGH_S:
        _said(chosen, made)
        times += 1
    return spent / times


@contextlib.contextmanager
def _ticking(waited: list[float]) -> Any:
    """Keep in ``waited`` the longest that a thread which wants the interpreter waits for it."""
    over = threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not over.is_set():
            time.sleep(0.001)
            now = time.monotonic()
            waited[0] = max(waited[0], now - last - 0.001)
            last = now

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def in_a_process(
    names: list[str], sizes: list[int], *, stall: bool, timeout_s: float
) -> list[dict[str, Any]]:
    """Return ``one``'s findings of each case, from a process of their own. No sizes: the case's
    ``small`` and GROWTH times that."""
    argv = [sys.executable, "-m", "benchmarks.parsers", "--json"]
    argv += [word for name in names for word in ("--case", name)]
    argv += [word for size in sizes for word in ("--bytes", str(size))]
    argv += ["--stall"] if stall else []
    with tempfile.TemporaryDirectory(prefix="paceline-parsers-") as scratch:
        done = subprocess.run(
            argv,
            check=True,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=Path(__file__).parents[1],
            env={**os.environ, "TMPDIR": scratch},
        )
    return list(json.loads(done.stdout.splitlines()[-1]))


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark, or one case of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=float, action="append")
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--case", action="append", help="this one, here in this process")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--stall", action="store_true")
    parser.add_argument("--timeout", type=float, default=600.0, help="of one case, in seconds")
    asked = parser.parse_args(arguments)
    sizes = [int(size) for size in asked.bytes or []]
    if asked.case:
        rows = []
        for name in asked.case:
            small = CASES[name].small
            rows += one(name, sizes or [small, GROWTH * small], stall=asked.stall)
        sys.stdout.write(json.dumps(rows) + "\n")
        return 0
    sizes = sizes or [SIZE]
    if not asked.json:
        print("| parser: input | bytes | seconds | stall s | peak MB | ends by |")
        print("|---|---:|---:|---:|---:|---|")
    for name in CASES:
        if not name.startswith(asked.only):
            continue
        try:
            rows = in_a_process([name], sizes, stall=True, timeout_s=asked.timeout)
        except subprocess.TimeoutExpired:
            print(f"| {name} | {sizes} | > {asked.timeout:.0f} | | | |", flush=True)
            continue
        for row in rows:
            if asked.json:
                print(json.dumps(row), flush=True)
            else:
                said = row["said"].replace("|", "/").replace("`", "")[:60]
                print(
                    f"| {name} | {row['bytes']:,} | {row['seconds']:.3f} | {row['stall_s']:.3f} | "
                    f"{row['peak_mb']} | {said} |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
