"""Bootstrap intervals: reproducible, paired, around their estimate, as wide as they say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from paceline.errors import InvalidSnapshot
from paceline.evaluation import SHORTEST_PREFIX_BYTES, Resampler, choose_prefixes, slice_rows
from paceline.schemas import Interval


def resampler(sizes: np.ndarray, samples: int = 400, seed: int = 0) -> Resampler:
    return Resampler(sizes, samples=samples, confidence=0.95, seed=seed)


def test_the_same_seed_gives_the_same_interval() -> None:
    random = np.random.default_rng(1)
    sizes, bits = random.uniform(100, 900, 30), random.uniform(200, 3000, 30)
    assert resampler(sizes).ratio(bits) == resampler(sizes).ratio(bits)
    assert resampler(sizes).ratio(bits) != resampler(sizes, seed=1).ratio(bits)


@given(bits=st.lists(st.floats(0, 1e6), min_size=1, max_size=30), seed=st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_an_interval_holds_its_estimate(bits: list[float], seed: int) -> None:
    sizes = np.arange(1, len(bits) + 1, dtype=np.float64)
    found = resampler(sizes, samples=100, seed=seed).ratio(np.array(bits))
    assert found.low <= found.value <= found.high
    assert found.value == pytest.approx(sum(bits) / sizes.sum())


def test_pairing_removes_what_documents_have_in_common() -> None:
    random = np.random.default_rng(2)
    sizes = np.full(40, 1000.0)
    hard = random.uniform(1000, 5000, 40)  # some documents are hard for everybody
    better = hard - random.uniform(40, 60, 40)
    draws = resampler(sizes)
    apart = draws.ratio(hard).high - draws.ratio(hard).low
    paired = draws.ratio(better - hard)
    assert paired.high < 0
    assert paired.high - paired.low < apart / 50


def test_95_percent_intervals_cover_the_truth_about_that_often() -> None:
    random = np.random.default_rng(3)
    sizes = np.full(40, 1.0)
    covered = 0
    for trial in range(300):
        found = resampler(sizes, samples=200, seed=trial).ratio(random.normal(2.0, 0.5, 40))
        covered += found.low <= 2.0 <= found.high
    assert 0.90 <= covered / 300 <= 0.98


@given(
    sizes=st.lists(st.integers(0, 20_000), min_size=1, max_size=60).filter(any),
    budget=st.integers(1024, 100_000),
)
@settings(max_examples=30, deadline=None)
def test_held_out_bytes_fill_the_budget_with_many_prefixes(sizes: list[int], budget: int) -> None:
    documents = [(f"d/{number}", bytes([number % 251]) * size) for number, size in enumerate(sizes)]
    chosen = choose_prefixes(documents, budget)
    assert chosen == choose_prefixes(documents[::-1], budget)
    taken = sum(len(each.text) for each in chosen)
    assert 0 < taken <= budget
    if sum(sizes) >= budget:
        assert taken > budget / 2 or len(chosen) == budget // SHORTEST_PREFIX_BYTES
    else:
        assert len(chosen) == min(sum(map(bool, sizes)), budget // SHORTEST_PREFIX_BYTES)
    whole = dict(documents)
    assert all(whole[each.path].startswith(each.text) and each.text for each in chosen)
    assert all(each.size == len(whole[each.path]) for each in chosen)


def test_nothing_held_out_is_an_error() -> None:
    with pytest.raises(InvalidSnapshot, match="nothing is held out"):
        choose_prefixes([("a", b"")], 4096)


def resampled(bits: Any, sizes: Any) -> Interval:
    return Resampler(sizes, samples=200, confidence=0.9, seed=3).ratio(bits)


def test_each_column_has_slices_with_paired_intervals() -> None:
    random = np.random.default_rng(0)
    langs, topics = ("en", "de", "fr"), ("law", "code")
    names = [f"lang={langs[n % 3]}/topic={topics[n % 2]}/a/{n}" for n in range(60)]
    documents = choose_prefixes([(name, b"x" * 200) for name in names], 65_536)
    sizes = np.array([float(len(each.text)) for each in documents])
    base = sizes * random.uniform(1, 4, len(documents))
    figures = {"candidate": base - random.uniform(0, 50, len(documents)), "base": base}
    rows = slice_rows(figures, documents, resampled, most_values=2)
    kinds = {(row["slice"], row["name"]) for row in rows if row["slice"] in ("lang", "topic")}
    assert kinds == {
        ("lang", "de"), ("lang", "en"), ("lang", "(others)"), ("topic", "law"), ("topic", "code"),
    }  # fmt: skip
    assert not [row for row in rows if row["slice"] == "directory"]
    (german,) = [row for row in rows if row["name"] == "de"]
    own = [at for at, each in enumerate(documents) if each.path.startswith("lang=de/")]
    wanted = resampled((figures["candidate"] - base)[own], sizes[own])
    assert german["difference_to"] == {"base": wanted.model_dump()}
    assert wanted.low < wanted.value < wanted.high < 0


def test_slices_cover_every_document_once() -> None:
    documents = choose_prefixes(
        [(f"{'abcdefghijk'[n % 11]}/{n}", b"x" * (50 + n)) for n in range(33)], 65_536
    )
    bits = np.array([8.0 * len(each.text) for each in documents])
    bits[7] *= 2
    rows = slice_rows({"candidate": bits, "base": bits / 2}, documents, resampled)
    for kind in ("size", "directory"):
        members = [row for row in rows if row["slice"] == kind]
        assert sum(int(str(row["documents"])) for row in members) == 33
        assert sum(int(str(row["bytes"])) for row in members) == sum(d.size for d in documents)
    assert [row["slice"] for row in rows].count("size") == 4
    assert next(row for row in rows if row["slice"] == "directory" and row["name"] == "(others)")
    worst = next(row for row in rows if row["slice"] == "worst document")
    assert worst["name"] == documents[7].path
    assert worst["bits_per_byte"] == {"candidate": 16.0, "base": 8.0}
