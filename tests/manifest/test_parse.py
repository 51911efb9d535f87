from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.errors import InvalidManifest
from paceline.manifest import (
    Chunk,
    FileEntry,
    Manifest,
    Signature,
    parse as parse_module,
    parse_manifest,
)
from paceline.schemas import canonical_json, digest_of

H = "0123456789abcdef" * 4
P = 1024


def a_manifest() -> Manifest:
    return Manifest(
        model_id="m",
        version="1.0",
        piece_bytes=P,
        chunk_bytes=2 * P,
        files=(
            FileEntry("a/weights", 3 * P + 5, H, (H,) * 4),
            FileEntry("empty", 0, H, ()),
            FileEntry("z", 7, H, (H,)),
        ),
        chunks=(Chunk(0, 0, 2 * P, H), Chunk(1, 2 * P, P + 12, H)),
    )


def document() -> dict[str, Any]:
    return json.loads(a_manifest().to_bytes())


def sealed(body: dict[str, Any]) -> bytes:
    """Return ``body`` with a checksum that fits, so that only the lie in it can be found."""
    beside = {"global_checksum", "signature"}  # what the checksum does not cover
    covered = {key: value for key, value in body.items() if key not in beside}
    return canonical_json({**body, "global_checksum": digest_of(covered)})


def change(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]

    def apply(body: dict[str, Any]) -> None:
        at: Any = body
        for part in parents:
            at = at[part]
        at[last] = value

    return apply


def test_a_manifest_survives_its_round_trip() -> None:
    manifest = a_manifest()
    assert parse_manifest(manifest.to_bytes()) == manifest
    assert parse_manifest(json.dumps(document(), indent=2).encode()) == manifest
    assert sealed(document()) == manifest.to_bytes()


def test_the_checksum_covers_everything_but_itself_and_who_signed() -> None:
    signed = replace(a_manifest(), signature=Signature(H, H * 2))
    assert parse_manifest(signed.to_bytes()) == signed
    assert signed.digest == a_manifest().digest
    assert canonical_json(json.loads(signed.to_bytes())) == signed.to_bytes()
    body = document()
    del body["global_checksum"]
    assert digest_of(body) == a_manifest().digest


def test_a_manifest_of_sha256_pieces_has_the_form_of_older_versions() -> None:
    older = replace(a_manifest(), piece_hash="sha256")
    body = json.loads(older.to_bytes())
    assert body["format"] == "paceline-manifest/1"
    assert "piece_hash" not in body
    assert parse_manifest(older.to_bytes()) == older
    assert older.digest != a_manifest().digest


@pytest.mark.parametrize("name", ["md5", "BLAKE3", "sha256", "", ["blake3"]])
def test_an_unknown_piece_hash_is_refused_by_name(name: object) -> None:
    body = {**document(), "piece_hash": name}
    with pytest.raises(InvalidManifest, match=r"unknown piece hash.*'blake3'.*piece_hash"):
        parse_manifest(sealed(body))


LIES = {
    "another format": change("format", "paceline-manifest/3"),
    "bad model name": change("model_id", "../m"),
    "bad version": change("version", ""),
    "total too large": change("total_size", 3 * P + 13),
    "total too small": change("total_size", 3 * P + 11),
    "no total": change("total_size", 0),
    "boolean for a number": change("total_size", True),
    "float for a number": change("total_size", 3084.0),
    "huge number": change("total_size", 10**30),
    "negative size": change("files.0.size", -1),
    "piece too small": change("piece_size", 1),
    "piece too large": change("piece_size", 1 << 30),
    "chunk smaller than a piece": change("chunk_size", 1000),
    "chunk beyond its size": change("chunk_size", P),
    "absolute path": change("files.0.path", "/etc/passwd"),
    "path upwards": change("files.0.path", "a/../../b"),
    "dot component": change("files.0.path", "a/./b"),
    "empty component": change("files.0.path", "a//b"),
    "trailing slash": change("files.0.path", "a/"),
    "empty path": change("files.0.path", ""),
    "NUL in path": change("files.0.path", "a\0b"),
    "newline in path": change("files.0.path", "a\nb"),
    "backslash in path": change("files.0.path", "a\\b"),
    "long path": change("files.0.path", "a/" * 600 + "a"),
    "long component": change("files.0.path", "a" * 256),
    "deep path": change("files.0.path", "a/" * 40 + "a"),
    "the manifest's path": change("files.0.path", "Manifest.json"),
    "path twice": change("files.0.path", "z"),
    "path but for case": change("files.0.path", "Z"),
    "file is also a directory": change("files.0.path", "z/weights"),
    "directory is also a file": change("files.2.path", "A/weights/more"),
    "path no string": change("files.0.path", 5),
    "short digest": change("files.0.sha256", H[:-1]),
    "upper-case digest": change("files.0.sha256", H.upper()),
    "digest with newline": change("files.0.sha256", H[:-1] + "\n"),
    "piece digest not hex": change("files.0.pieces.1", "g" * 64),
    "piece digest short": change("files.0.pieces", [H, H[:-1], H + "0", H]),
    "piece digest no string": change("files.0.pieces.1", 7),
    "too few pieces": change("files.0.pieces", [H] * 3),
    "too many pieces": change("files.0.pieces", [H] * 5),
    "no files": change("files", []),
    "files no list": change("files", {}),
    "file no object": change("files.0", []),
    "no chunks": change("chunks", []),
    "chunk id": change("chunks.1.chunk_id", 0),
    "chunks with a gap": change("chunks.1.offset", 2 * P + 1),
    "chunks overlap": change("chunks.1.offset", 2 * P - 1),
    "chunk too long": change("chunks.1.size", P + 13),
    "chunk without bytes": change("chunks.1.size", 0),
    "chunk inside a piece": change(
        "chunks",
        [
            {"chunk_id": 0, "offset": 0, "size": P + 1, "checksum": H},
            {"chunk_id": 1, "offset": P + 1, "size": 2 * P, "checksum": H},
            {"chunk_id": 2, "offset": 3 * P + 1, "size": 11, "checksum": H},
        ],
    ),
    "chunk checksum": change("chunks.0.checksum", "sha512:" + H),
    "signature no object": change("signature", "x"),
    "signature without a value": change("signature", {"public_key": H}),
    "signature's key no hex": change("signature", {"public_key": H.upper(), "value": H * 2}),
    "signature too short": change("signature", {"public_key": H, "value": H}),
    "signature chooses an algorithm": change(
        "signature", {"public_key": H, "value": H * 2, "algorithm": "none"}
    ),
    "unknown key": change("algorithm", "md5"),
    "unknown key in a file": change("files.0.mode", 0o4755),
}


@pytest.mark.parametrize("lie", LIES)
def test_each_lie_is_refused_although_the_checksum_fits(lie: str) -> None:
    body = document()
    LIES[lie](body)
    with pytest.raises(InvalidManifest) as caught:
        parse_manifest(sealed(body))
    assert "checksum is wrong" not in str(caught.value), "another rule must find it"


def test_a_name_that_is_no_text_is_refused() -> None:
    raw = a_manifest().to_bytes().replace(b'"z"', b'"\\ud800"')
    with pytest.raises(InvalidManifest, match="not Unicode"):
        parse_manifest(raw)


def test_a_missing_key_is_refused() -> None:
    for key in document():
        body = document()
        del body[key]
        with pytest.raises(InvalidManifest, match=r"required|piece hash"):
            parse_manifest(canonical_json(body))


def test_a_changed_digest_does_not_fit_the_checksum() -> None:
    body = document()
    body["files"][0]["pieces"][2] = H[::-1]
    with pytest.raises(InvalidManifest, match=r"checksum is wrong.*global_checksum"):
        parse_manifest(canonical_json(body))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'"x',
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b'{"format": NaN}',
        b'{"format": -Infinity}',
        b'{"format": 1e999}',
        b'{"format": ' + b"9" * 100_000 + b"}",
        b'{"format": "a", "format": "a"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": [[[[[]]]]]}',
    ],
)
def test_what_is_no_manifest_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidManifest):
        parse_manifest(raw)


def test_a_duplicate_key_deep_inside_is_refused() -> None:
    raw = a_manifest().to_bytes().replace(b'"path":"z"', b'"path":"y","path":"z"')
    with pytest.raises(InvalidManifest, match="duplicate key"):
        parse_manifest(raw)


def test_size_is_bounded_before_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse_module, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(InvalidManifest, match="too large"):
        parse_manifest(b"[" * 101)
