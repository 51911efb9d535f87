from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import example, given, settings, strategies as st

from paceline.errors import CorruptData, InvalidInput, InvalidManifest, SourceMissing
from paceline.manifest import (
    MANIFEST_FILE,
    MAX_CHUNKS,
    Manifest,
    build as building,
    build_manifest,
    choose_sizes,
    chunk_layout,
    directory_name,
    is_older,
    parse_manifest,
    publish_model,
    strands,
    verify_directory,
    version_key,
    write_manifest,
)
from tests.support.rclone import RcloneS3

KIB, MIB = 1024, 1024 * 1024


def make_model(directory: Path, sizes: dict[str, int]) -> Path:
    for path, size in sizes.items():
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.urandom(size))
    return directory


def build(directory: Path, **options: Any) -> Manifest:
    return build_manifest(directory, model_id="m", version="1", link_mbit=40, **options)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(
        tmp_path / "model",
        {
            "config.json": 700,
            "empty": 0,
            "model-1.safetensors": 5 * MIB + 17,
            "model-2.safetensors": 3 * MIB,
            "sub/dir/tokenizer.json": 70_000,
        },
    )


def test_every_digest_is_of_the_bytes_it_names(model: Path) -> None:
    manifest = build(model)
    stream = b"".join((model / file.path).read_bytes() for file in manifest.files)

    def sha256(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    assert manifest.total_size == len(stream)
    assert [f.sha256 for f in manifest.files] == [
        sha256((model / f.path).read_bytes()) for f in manifest.files
    ]
    for chunk in manifest.chunks:
        assert chunk.checksum == sha256(stream[chunk.offset : chunk.offset + chunk.size])
    end = 0
    for piece in manifest.pieces:
        assert piece.stream_offset == end
        end += piece.length
        assert piece.digest == blake3(stream[piece.stream_offset : end]).hexdigest()
        file = manifest.files[piece.file_index]
        assert piece.file_offset + piece.length <= file.size
        assert piece.index in manifest.chunk_pieces(piece.chunk_id)
        assert piece.index in manifest.file_pieces(piece.file_index)
    assert end == len(stream)


def test_the_same_bytes_give_the_same_digest_and_other_bytes_another(model: Path) -> None:
    first = build(model)
    assert build(model) == first
    config = bytearray((model / "config.json").read_bytes())
    config[350] ^= 1
    (model / "config.json").write_bytes(config)
    assert build(model).digest != first.digest


def test_a_longer_header_shifts_no_piece_of_another_file(model: Path) -> None:
    before = build(model, piece_bytes=64 * KIB)
    with (model / "config.json").open("ab") as file:
        file.write(b"more")
    after = build(model, piece_bytes=64 * KIB)
    assert [f.pieces for f in before.files[1:]] == [f.pieces for f in after.files[1:]]


def test_the_index_finds_pieces_from_every_side(model: Path) -> None:
    manifest = build(model, piece_bytes=4 * KIB, chunk_bytes=64 * KIB)
    for piece in manifest.pieces:
        assert manifest.piece_at(piece.stream_offset) == piece.index
        assert manifest.piece_at(piece.stream_offset + piece.length - 1) == piece.index
    last = len(manifest.chunks) - 1
    found = [piece for chunk in range(last + 1) for piece in manifest.chunk_pieces(chunk)]
    assert found == list(range(manifest.piece_count))
    for wrong in (-1, manifest.piece_count):
        with pytest.raises(IndexError):
            manifest.piece_of(wrong)
    with pytest.raises(IndexError):
        manifest.chunk_pieces(last + 1)


def test_the_manifest_beside_the_model_is_not_part_of_it(model: Path) -> None:
    before = build(model)
    path = write_manifest(model, before)
    assert path.name == MANIFEST_FILE
    assert build(model) == before
    assert parse_manifest(path.read_bytes()) == before


@pytest.mark.parametrize("total", [1, 700_000, 20 * MIB, 500 * 10**9, 900 * 10**9])
@pytest.mark.parametrize("link_mbit", [6.0, 40.0, 10_000.0, 400_000.0])
def test_chosen_sizes_keep_their_bounds(total: int, link_mbit: float) -> None:
    piece, chunk = choose_sizes(total, link_mbit)
    assert 64 * KIB <= piece <= 16 * MIB
    assert piece & (piece - 1) == 0
    assert chunk >= piece
    assert chunk % piece == 0
    # at most a second of the link, unless there would be too many of them
    assert chunk <= max(link_mbit * 1e6 / 8, 64 * KIB, piece, 1.1 * total / (MAX_CHUNKS // 4))
    assert total <= 16 * 64 * KIB or total / chunk >= 15


@pytest.mark.parametrize(
    ("total", "kib"), [(50 * 10**6, 64), (110 * 10**6, 128), (256 * 10**6, 256), (2 * 10**9, 256)]
)
def test_a_line_of_eight_takes_at_most_one_percent_longer_for_its_pieces(
    total: int, kib: int
) -> None:
    piece, _ = choose_sizes(total, 100.0)
    assert piece == kib * KIB
    assert 8 * piece <= 0.011 * total


def test_a_large_model_on_a_fast_link_has_chunks_of_a_gigabyte() -> None:
    piece, chunk = choose_sizes(500 * 10**9, 10_000)
    assert chunk == pytest.approx(1e9, rel=0.02)
    assert 32 * piece / 1.25e9 <= 0.005 * 400


@pytest.mark.parametrize(
    "options",
    [
        {"piece_bytes": 1023},
        {"piece_bytes": 16 * MIB + 1},
        {"piece_bytes": -1},
        {"piece_bytes": 64 * KIB, "chunk_bytes": 32 * KIB},
    ],
)
def test_sizes_out_of_range_are_refused(model: Path, options: dict[str, int]) -> None:
    with pytest.raises(InvalidInput):
        build(model, **options)


def test_more_pieces_or_chunks_than_a_manifest_holds_are_refused() -> None:
    with pytest.raises(InvalidInput, match="too many pieces"):
        choose_sizes(10**9, 1000, piece_bytes=KIB)
    with pytest.raises(InvalidInput, match="too many chunks"):
        choose_sizes(400 * MIB, 1000, piece_bytes=KIB, chunk_bytes=KIB)


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=40),
    piece=st.integers(1, 300),
    pieces_in_chunk=st.integers(1, 9),
    more=st.integers(0, 299),
)
@example(sizes=[50, 251], piece=100, pieces_in_chunk=3, more=0)
def test_chunks_are_whole_pieces_and_tile_the_stream(
    sizes: list[int], piece: int, pieces_in_chunk: int, more: int
) -> None:
    chunk = piece * pieces_in_chunk + more % piece
    if not any(sizes):
        sizes = [*sizes, 1]  # a model has a byte
    runs = strands(sizes, chunk_layout(sizes, piece, chunk))
    assert [(s.first_file, s.last_file) for s in runs] == list(
        zip(
            [s.first_file for s in runs],
            [*[s.first_file for s in runs[1:]], len(sizes)],
            strict=True,
        )
    )
    edges, offset = set(), 0  # where pieces begin
    for size in sizes:
        edges.update(range(offset, offset + size, piece))
        offset += size
    at = 0
    for strand in runs:
        assert sum(strand.chunk_sizes) == sum(sizes[strand.first_file : strand.last_file])
        for size in strand.chunk_sizes:
            assert 0 < size <= chunk
            assert at in edges
            at += size
    assert at == offset


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 40_000), min_size=1, max_size=8).filter(any),
    pieces_in_chunk=st.integers(1, 5),
)
def test_any_model_survives_its_round_trip(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], pieces_in_chunk: int
) -> None:
    files = {f"f{number}": size for number, size in enumerate(sizes)}
    directory = make_model(tmp_path_factory.mktemp("model"), files)
    manifest = build(directory, piece_bytes=KIB, chunk_bytes=KIB * pieces_in_chunk)
    assert parse_manifest(manifest.to_bytes()) == manifest
    verify_directory(directory, manifest)


def hub_cache(root: Path) -> Path:
    """Make a snapshot as Hugging Face's cache has it, of links to blobs; return it."""
    repository = root / "models--acme--tiny"
    snapshot = repository / "snapshots/0123abc"
    (repository / "blobs").mkdir(parents=True)
    (snapshot / "nested").mkdir(parents=True)
    for name, up in (("config.json", "../.."), ("nested/weights", "../../..")):
        (repository / "blobs" / f"of-{name[:4]}").write_text(f"content of {name}")
        (snapshot / name).symlink_to(f"{up}/blobs/of-{name[:4]}")
    return snapshot


def test_links_of_a_hub_cache_are_followed_and_no_others(s3: RcloneS3, tmp_path: Path) -> None:
    snapshot, store = hub_cache(tmp_path), s3.store()
    url = "s3://hub-cache/m/1"
    store.ensure_bucket("hub-cache")
    made = publish_model(snapshot, url, model_id="m", version="1", store=store, link_mbit=1000)
    assert [each.path for each in made.files] == ["config.json", "nested/weights"]
    assert store.get_bytes(f"{url}/nested/weights") == b"content of nested/weights"
    outside = tmp_path / "outside"
    outside.write_text("private")
    for target in (outside, tmp_path / "models--acme--tiny/blobs/../../outside", "gone"):
        (snapshot / "more").symlink_to(target)
        with pytest.raises(InvalidManifest, match=r"a symlink.*'more'"):
            build(snapshot)
        (snapshot / "more").unlink()


def test_symlinks_and_special_files_are_refused_by_name(model: Path) -> None:
    link = model / "link.bin"
    link.symlink_to("config.json")
    with pytest.raises(InvalidManifest, match=r"symlink.*link\.bin"):
        build(model)
    link.unlink()
    (model / "loop").symlink_to(".", target_is_directory=True)
    with pytest.raises(InvalidManifest, match="symlink"):
        build(model)
    (model / "loop").unlink()
    os.mkfifo(model / "pipe")
    with pytest.raises(InvalidManifest, match=r"special file.*pipe"):
        build(model)
    (model / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(model / "s"))
        with pytest.raises(InvalidManifest, match="special file"):
            build(model)


@pytest.mark.parametrize(
    "names", [("A.bin", "a.bin"), ("caf\u00e9", "cafe\u0301"), ("stra\u00dfe", "STRASSE")]
)
def test_names_that_collide_elsewhere_are_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    make_model(tmp_path, dict.fromkeys(names, 5))
    with pytest.raises(InvalidManifest, match="collide"):
        build(tmp_path)


def test_names_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"bad\xff")).write_bytes(b"x")
    with pytest.raises(InvalidManifest, match="not Unicode"):
        build(tmp_path)


def test_a_model_without_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidManifest, match="no files"):
        build(tmp_path)
    make_model(tmp_path, {"a": 0, MANIFEST_FILE: 5})
    with pytest.raises(InvalidManifest, match="1 empty files"):
        build(tmp_path)


def test_a_missing_directory_and_a_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(SourceMissing, match="nothing"):
        build(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(InvalidManifest, match="not a directory"):
        build(tmp_path / "file")


def test_a_bad_model_name_is_refused(model: Path) -> None:
    for name in ("", "../x", "a//b", "/a", "a/", "a/..", "a/b/c/d/e", "a\n", "é", "x" * 129):
        with pytest.raises(InvalidManifest, match="model_id"):
            build_manifest(model, model_id=name, version="1", link_mbit=1)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: (d / "empty").unlink(), "missing"),
        (lambda d: (d / "config.json").write_bytes(b"x" * 700), "does not match"),
        (lambda d: (d / "config.json").write_bytes(b"x" * 701), "another size"),
        (lambda d: (d / "extra").touch(), "does not name"),
        (lambda d: ((d / "empty").unlink(), (d / "empty").symlink_to("/dev/null")), "symlink"),
    ],
)
def test_verification_names_what_is_wrong(model: Path, damage: object, says: str) -> None:
    manifest = build(model)
    verify_directory(model, manifest)
    damage(model)  # type: ignore[operator]
    with pytest.raises(CorruptData, match=says):
        verify_directory(model, manifest)


@pytest.mark.parametrize(("of", "says"), [("files", r"not match.*/b\b"), ("chunks", "chunk 1")])
def test_full_verification_compares_sha256_of_files_and_chunks(
    tmp_path: Path, of: str, says: str
) -> None:
    model = make_model(tmp_path / "model", {"a": 3000, "b": 3000, "c": 900})
    manifest = build(model, piece_bytes=KIB, chunk_bytes=2 * KIB)
    verify_directory(model, manifest, full=True)
    first, second, *others = getattr(manifest, of)
    name = "sha256" if of == "files" else "checksum"
    wrong = replace(manifest, **{of: (first, replace(second, **{name: "0" * 64}), *others)})
    verify_directory(model, wrong)
    with pytest.raises(CorruptData, match=says):
        verify_directory(model, wrong, full=True)


def test_extra_files_are_permitted_only_when_asked(model: Path) -> None:
    manifest = build(model)
    (model / "extra").touch()
    verify_directory(model, manifest, allow_extra=True)


def test_versions_sort_as_people_read_them() -> None:
    ordered = ["1", "1.2", "1.9", "1.10", "2", "10"]
    assert sorted(set(ordered), key=version_key) == ordered
    assert version_key("v2") < version_key("v10")
    assert version_key("20261120-1") < version_key("20261120-2")
    assert sorted(["1.a", "1.1", "b", "a1"], key=version_key)  # mixed kinds compare


@pytest.mark.parametrize("cores", [1, 16])
@pytest.mark.parametrize(
    ("piece_hash", "of_pieces"), [("blake3", blake3), ("sha256", hashlib.sha256)]
)
def test_the_digests_are_the_same_on_any_number_of_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, piece_hash: Any, of_pieces: Any
) -> None:
    data = bytes((each * each) % 251 for each in range(300_001))
    (tmp_path / "a").write_bytes(data)
    monkeypatch.setattr(building, "usable_cores", lambda: cores)
    made = build(tmp_path, piece_bytes=65_536, chunk_bytes=131_072, piece_hash=piece_hash)
    assert made.piece_hash == piece_hash
    digest = lambda first, stop: hashlib.sha256(data[first:stop]).hexdigest()  # noqa: E731
    (file,) = made.files
    assert file.sha256 == digest(0, None)
    assert list(file.pieces) == [
        of_pieces(data[at : at + 65_536]).hexdigest() for at in range(0, 300_001, 65_536)
    ]
    assert [each.checksum for each in made.chunks] == [
        digest(each.offset, each.offset + each.size) for each in made.chunks
    ]


def test_digesting_that_is_stopped_ends_within_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    for name in "abc":
        (tmp_path / "a" / name).write_bytes(bytes(200_000))
    hashed, hash_block = [], building.Digesting._hash

    def interrupted(hasher: Any, block: memoryview, *rest: Any) -> list[str]:
        hashed.append(len(block))
        if len(hashed) == 2:
            raise KeyboardInterrupt
        return hash_block(hasher, block, *rest)

    monkeypatch.setattr(building, "BLOCK", 4096)
    monkeypatch.setattr(building, "MAX_STRANDS", 1)
    monkeypatch.setattr(building.Digesting, "_hash", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build_manifest(
            tmp_path / "a", model_id="m", version="1", link_mbit=1, piece_bytes=1024,
            chunk_bytes=4096,
        )  # fmt: skip
    assert len(hashed) < 100  # of 147 blocks: other threads may be within theirs


def test_a_hubs_name_is_one_directory_and_its_commits_have_no_order() -> None:
    assert building.check_name("model_id", "meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"
    with pytest.raises(InvalidManifest, match="version"):
        building.check_name("version", "a/b")
    assert directory_name("meta-llama/Llama-3.1-8B") == "meta-llama+Llama-3.1-8B"
    assert is_older("v2", "v10")
    assert not is_older("v10", "v2")
    assert not is_older("a" * 40, "b" * 40)
    assert not is_older("1" * 64, "v2")
