"""Archives as a hostile writer makes them: members and headers byte by byte."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable

import numpy as np


def tar_of(members: Iterable[tuple[str, bytes]]) -> bytes:
    """An archive of these members in this order."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, body in members:
            info = tarfile.TarInfo(name)
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    return file.getvalue()


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A header's block that claims ``size`` bytes."""
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")[-512:]


def block(data: bytes) -> bytes:
    """The data as blocks."""
    return data + b"\0" * (-len(data) % 512)


def npy(text: str, numbers: bytes = b"\0" * 64, version: int = 1) -> bytes:
    """An npy file with this header, whatever it says."""
    raw = text.encode("latin-1") + b"\n"
    length = len(raw).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + raw + numbers


def npy_of(array: np.ndarray) -> bytes:
    """An npy file of ``array``."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def numbers(descr: str = "'<f4'", shape: str = "(2,)", order: str = "False") -> str:
    """The header of an npy file."""
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"


HUGE_AXIS = 2**40
ODD_MEMBERS: dict[str, tuple[str, bytes]] = {
    "eight-terabytes": ("x.npy", npy(numbers(shape="(1000000, 2000000)"))),
    "more-than-there-is": ("x.npy", npy(numbers(shape="(17,)"))),
    "negative-shape": ("x.npy", npy(numbers(shape="(-4,)"))),
    "shape-beyond-int64": ("x.npy", npy(numbers(shape=f"({2**80},)"))),
    "empty-but-endless": ("x.npy", npy(numbers(shape=f"({HUGE_AXIS}, 0)"))),
    "many-axes": ("x.npy", npy(numbers(shape="(" + "1," * 40 + ")"))),
    "objects": ("x.npy", npy_of(np.array([{"a": 1}], dtype=object))),
    "structured": ("x.npy", npy_of(np.zeros(2, dtype=[("a", "<f4"), ("b", "<i2")]))),
    "subarray": ("x.npy", npy(numbers("('<f4', (1000000, 1000000))"))),
    "wide-strings": ("x.npy", npy(numbers("'<U1000000000'"))),
    "dates": ("x.npy", npy_of(np.array(["2020-01-01"], dtype="datetime64[D]"))),
    "open-parenthesis": ("x.npy", npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,")),
    "unfinished-string": ("x.npy", npy("{'descr': '''<f4")),
    "nested-header": ("x.npy", npy("(" * 4000)),
    "long-header": ("x.npy", npy(numbers() + " " * 50_000)),
    "header-of-four-gigabytes": ("x.npy", b"\x93NUMPY\2\0\xff\xff\xff\xff{"),
    "code-in-the-header": ("x.npy", npy("__import__('os').abort()")),
    "version-3": ("x.npy", npy(numbers(), version=3)),
    "version-9": ("x.npy", b"\x93NUMPY\x09\0"),
    "no-npy": ("x.npy", b""),
    "whole-number-of-65-bits": ("x.cls", str(2**64).encode()),
    "endless-digits": ("x.cls", b"9" * 100_000),
    "no-number": ("x.cls", b"\xff"),
    "deep-json": ("x.json", b"[" * 100_000 + b"]" * 100_000),
    "json-digits": ("x.json", b'{"x":' + b"9" * 50_000 + b"}"),
    "json-integer-beyond-floats": ("x.json", b'{"x":[' + b"9" * 1000 + b', "1", [2]]}'),
    "json-values": ("x.json", b"[" + b"[]," * 4_000_000 + b"[]]"),
    "surrogate-column": ("x.json", rb'{"\ud800": 1}'),
    "empty-column": ("x.json", b'{"": 1}'),
    "long-column": ("x.json", json.dumps({"n" * 500: 1}).encode()),
    "many-columns": ("x.json", json.dumps({f"c{n}": n for n in range(2000)}).encode()),
    "column-of-ends": ("x.json", b'{"a": [1, 2], "a.ends": 3}'),
    "utf-16-and-cut": ("x.json", b"\xff\xfe{"),
    "k" * 5000: ("txt", b"a key that is too long"),
    "": ("txt", b"a key that is empty"),
    "no-extension": ("", b"bytes"),
}
