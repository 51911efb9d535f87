"""Sixteen times the bytes cost a parser of foreign bytes about sixteen times the CPU time, not 256.

The inputs are those of ``benchmarks/parsers.py``, in processes of their own, which are ended where
they hang. Ratios are compared, no times.
"""

from __future__ import annotations

import pytest

from benchmarks import parsers
from paceline.config import load_profile
from paceline.errors import InvalidInput, InvalidManifest, InvalidProfile
from paceline.manifest import check_paths, parse_manifest, version_key
from paceline.models import read_config
from paceline.schemas import parse_json
from paceline.units import size_bytes

# Memory that no cache holds any more costs up to five times as much a byte; quadratic is sixteen.
MOST = 6 * parsers.GROWTH
HANG_S = 110
# Parquet takes as long as all others together; profiles are written by the operator.
NIGHTLY = ("Parquet", "profile", "checkpoint layout (exchanged)")
TRAINING = (
    "config.json",
    "safetensors",
    "checkpoint",
    "gang frame",
    "JSONL",
    "tar",
)  # import torch
# One parser reads the bodies of all routes: all inputs as one record, and another one's own.
REST = [
    name
    for name in parsers.CASES
    if name.startswith("REST: Heartbeat:") or name == "REST: CreateDeployment: targets"
]
OTHERS = [name for name in parsers.CASES if name.partition(":")[0] not in ("REST", *NIGHTLY)]
GROUPS = {
    "trainers": [name for name in OTHERS if name.startswith(TRAINING)],
    "coordinators and agents": [name for name in OTHERS if not name.startswith(TRAINING)],
    "REST": REST,
}


@pytest.mark.parametrize(
    "names",
    [
        *(pytest.param(names, id=group) for group, names in GROUPS.items()),
        *(
            pytest.param(
                [name for name in parsers.CASES if name.startswith(f"{parser}:")],
                id=parser,
                marks=pytest.mark.nightly,
            )
            for parser in NIGHTLY
        ),
    ],
)
def test_a_byte_of_a_large_input_costs_as_much_as_of_a_small_one(names: list[str]) -> None:
    rows = parsers.in_a_process(names, [], stall=False, timeout_s=HANG_S)
    for small, large in zip(rows[::2], rows[1::2], strict=True):
        assert large["cpu_s"] <= MOST * small["cpu_s"], (small, large)


def test_the_benchmark_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsers.main(["--bytes", "2e4", "--only", "token"]) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.startswith("| parser: input | bytes | seconds |")
    assert len(rows) == 2
    assert all("AccessDenied" in row for row in rows)


def test_the_measure_tells_quadratic_from_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    squares = parsers.Case(bytes, lambda raw: [raw.count(b"x") for _ in range(len(raw) // 100)])
    monkeypatch.setitem(parsers.CASES, "planted", squares)
    small, large = parsers.one("planted", [5_000, 5_000 * parsers.GROWTH], stall=False)
    assert large["cpu_s"] > MOST * small["cpu_s"]


def test_a_duplicate_key_among_many_is_named() -> None:
    keys = b",".join(b'"k%06d":1' % number for number in range(20_000))
    with pytest.raises(InvalidManifest, match=r"duplicate key.*'k000007'"):
        parse_manifest(b"{%s,%s}" % (keys, b'"k000007":2'))
    with pytest.raises(ValueError, match="duplicate key 'k000007'"):
        parse_json(b"{%s,%s}" % (keys, b'"k000007":2'))


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, '{"a":1,"a":2}', "\xff", "nope", ""])
def test_json_from_outside_is_a_value_or_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text.encode("latin-1"))


@pytest.mark.parametrize("value", ["1" * 5000, "[" * 100_000, '{"a":1,"a":1}'])
def test_a_config_that_no_two_parsers_read_alike_is_refused(tmp_path, value: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"hidden_size":{value}}}')
    with pytest.raises(Exception, match="not JSON") as caught:
        read_config(tmp_path)
    assert caught.value.code == "CorruptData"


@pytest.mark.parametrize(
    "text", ["a=" + "[" * 100_000, "a." * 2000 + "a=1", "#" * 300_000, "a=\xff"]
)
def test_a_profile_that_cannot_be_read_is_an_invalid_profile(tmp_path, text: str) -> None:
    path = tmp_path / "p.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidProfile, match="cannot be read"):
        load_profile(str(path))


@pytest.mark.parametrize(("key", "value"), [("", "[" * 100_000), (".a" * 900, "1")])
def test_an_override_that_is_nested_deeply_is_an_invalid_profile(key: str, value: str) -> None:
    with pytest.raises(InvalidProfile):
        load_profile("embedded", {f"cluster.nodes{key}": value})


@pytest.mark.parametrize(
    "paths",
    [("a", "a/b"), ("a/b", "a"), ("a/b/c", "A/B"), ("a", "a-b", "a/b"), ("a", "A"), ("é", "é")],
)
def test_paths_that_collide_are_found_among_others(paths: tuple[str, ...]) -> None:
    with pytest.raises(InvalidManifest, match="collide"):
        check_paths([*paths, "z", "a!", "b/a"])


def test_paths_that_share_a_beginning_do_not_collide() -> None:
    check_paths(["a", "a-b", "a.b", "ab", "a!/b", "b/a", "b/a-", "b/aa"])


def test_sizes_are_numbers_with_a_unit() -> None:
    for text in ("12B", "1.5GB", " 7 MiB ", ".5k", "1e3B", "2E3B"):
        assert size_bytes(text) > 0
    for text in ("1", "1.", "1..2", "1e", "-1", "", "1 2", "1!"):
        with pytest.raises(InvalidInput):
            size_bytes(text)


def test_a_version_of_digits_beyond_ascii_is_compared_as_letters() -> None:
    assert version_key("²") < version_key("2")
