"""Whole documents in rows: nothing lost, nothing twice, nothing mixed, little left empty."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, insort
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from paceline.config import DataSettings
from paceline.data import Column, Shard, Snapshot, open_stream
from paceline.data.batching import BucketedPlan, PackedPlan, StatefulPlan, best_fit
from paceline.data.formats import ShardSamples
from paceline.data.loading import PADDING
from paceline.errors import CorruptData, DataRejected, InvalidInput
from tests.data.memory import MemoryCache, MemorySamples, made, stream_by

KINDS = {"packed": PackedPlan, "bucketed": BucketedPlan, "carried": StatefulPlan}
LENGTHS = st.lists(st.lists(st.integers(1, 70), max_size=12), min_size=1, max_size=9)


def planned(kind: str, lengths: list[list[int]], context: int, batch: int, in_group: int = 3):
    sizes = [sum(each) + len(each) + 1 for each in lengths]

    def lengths_of(indexes):
        return [np.array(lengths[each], dtype=np.int32) for each in indexes]

    return KINDS[kind](sizes, lengths_of, context, batch, 7, in_group)


def lognormal(documents: int, seed: int = 0) -> np.ndarray:
    """Lengths as texts have them: a median of 245 tokens, a long tail, 8,000 at most."""
    drawn = np.random.default_rng(seed).lognormal(5.5, 1.2, documents)
    return np.clip(drawn, 1, 8000).astype(np.int64)


@given(lengths=st.lists(st.integers(1, 60), max_size=150), capacity=st.integers(60, 90))
@settings(max_examples=30, deadline=None)
def test_best_fit_opens_as_many_rows_as_the_textbook_does_one_by_one(lengths, capacity) -> None:
    rows = best_fit(np.array(lengths, dtype=np.int64), capacity)
    used = np.bincount(rows, weights=lengths, minlength=1) if lengths else np.zeros(1)
    assert used.max() <= capacity
    rooms: list[int] = []
    opened = 0
    for length in sorted(lengths, reverse=True):
        at = bisect_left(rooms, length)
        room = rooms.pop(at) if at < len(rooms) else capacity
        opened += room == capacity
        if room > length:
            insort(rooms, room - length)
    assert len(set(rows.tolist())) == opened


@given(lengths=LENGTHS, context=st.integers(1, 40), batch=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_a_carried_row_goes_on_exactly_where_its_lane_stopped(lengths, context, batch) -> None:
    plan = planned("carried", lengths, context, batch)
    for group in range(plan.groups):
        rows = plan.rows(0, group)
        ends: dict[int, tuple[int, int, int] | None] = dict.fromkeys(range(batch))
        for row in range(len(rows)):
            first, last = rows.first_R1[row : row + 2]
            assert last - first <= 1, "a document begins at a row's start"
            lane = row % batch
            if first == last:
                assert not rows.carries_R[row]
                ends[lane] = None
                continue
            here = (int(rows.shard_P[first]), int(rows.document_P[first]))
            position = int(rows.position_P[first])
            assert bool(rows.carries_R[row]) == (position > 0)
            if position:
                assert ends[lane] == (*here, position)
            ends[lane] = (*here, position + int(rows.length_P[first]))


@given(
    kind=st.sampled_from(sorted(KINDS)),
    contents=st.lists(
        st.lists(st.binary(min_size=1, max_size=50).filter(lambda each: 255 not in each)),
        min_size=1,
        max_size=5,
    ).filter(any),
    context=st.integers(2, 24),
)
@settings(max_examples=30, deadline=None)
def test_weights_inputs_and_targets_never_cross_a_documents_edge(kind, contents, context) -> None:
    cache = MemoryCache([each for each in contents if each])
    framed = Counter()
    for documents in contents:
        for each in documents:
            whole = b"\xff" + each + b"\xff"
            framed.update(whole[n : n + 2] for n in range(len(whole) - 1))
    seen: Counter[bytes] = Counter()
    with stream_by(cache, kind, context, 3) as stream:
        rows = sum(len(stream.plan.rows(0, group)) for group in range(stream.plan.groups))
        for batch in made(stream, rows // 3):
            kept = batch.weights_BT > 0
            assert batch.global_tokens == kept.sum(), "one rank: what it has is all there is"
            pairs = np.stack([batch.inputs_BT[kept], batch.targets_BT[kept]], axis=1)
            seen.update(each.tobytes() for each in pairs)
            same_place = batch.positions_BT[:, 1:] == batch.positions_BT[:, :-1] + 1
            going_on = kept[:, 1:] & kept[:, :-1] & same_place
            if batch.documents_BT is not None:
                assert ((batch.documents_BT == PADDING) == ~kept).all()
                one = batch.documents_BT[:, 1:] == batch.documents_BT[:, :-1]
                assert (same_place & one)[kept[:, 1:] & kept[:, :-1] & one].all()
                going_on &= one
            chained = batch.inputs_BT[:, 1:] == batch.targets_BT[:, :-1]
            assert chained[going_on].all(), "within a document, the target is the next input"
    missing = framed - seen
    assert not seen - framed, "nothing that no document holds, nothing twice"
    assert sum(missing.values()) <= (rows % 3) * context, "what goes on into the next epoch"


def test_documents_longer_than_the_context_go_on_with_their_positions() -> None:
    text = bytes(range(1, 21))
    cache = MemoryCache([[text]])
    with stream_by(cache, "packed", 8, 3) as stream:
        batch = made(stream, 1)[0]
    order = np.argsort(batch.positions_BT[:, 0])
    assert batch.positions_BT[order].ravel()[:21].tolist() == list(range(21))
    assert batch.inputs_BT[order].ravel()[:21].tobytes() == b"\xff" + text
    assert batch.targets_BT[order].ravel()[:21].tobytes() == text + b"\xff"
    assert batch.weights_BT[order].ravel().tolist() == [1.0] * 21 + [0.0] * 3
    assert batch.documents_BT[order].ravel().tolist() == [0] * 21 + [PADDING] * 3


def test_the_orders_are_the_same_on_every_machine() -> None:
    lengths = [[5, 30, 8], [12, 3, 3, 17], [40]]
    found = {kind: planned(kind, lengths, 16, 2).rows(1, 0).document_P.tolist() for kind in KINDS}
    assert found == GOLDEN


GOLDEN = {
    "packed": [1, 3, 2, 2, 0, 0, 0, 1, 0, 1, 3, 0],
    "bucketed": [1, 0, 0, 2, 0, 2, 1, 0, 3, 0, 1, 3],
    "carried": [0, 3, 0, 3, 0, 0, 0, 1, 2, 1, 2, 1],
}


class WithFeatures(MemoryCache):
    """Each document has an embedding, and a loudness for each token; document 1 of shard 0 is bad,
    as where an online transform fails."""

    def samples(self, shard: Shard) -> ShardSamples:
        texts = list(self._contents[shard.sha256])
        return _Heard(texts, bad=shard is self.shards[0])


class _Heard(MemorySamples):
    def __init__(self, texts: list[bytes], bad: bool) -> None:
        super().__init__(texts)
        self._bad = bad

    def flat(self) -> None:
        return None

    def tokens(self, i: int) -> np.ndarray:
        if self._bad and i == 1:
            raise CorruptData("transform failed")
        return super().tokens(i)

    def features(self, i: int) -> dict[str, np.ndarray]:
        tokens = super().tokens(i)
        return {
            "embedding": np.array([tokens[0], len(tokens)], dtype=np.float32),
            "loudness": tokens.astype(np.float32) / 10,
        }


COLUMNS = [
    Column(name="embedding", dtype="float32", shape=(None,)),
    Column(name="loudness", dtype="float32", shape=(None,)),
]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_features_stand_beside_the_document_and_the_token_they_belong_to(kind) -> None:
    contents = [[bytes([n]) * (3 * n + 1) for n in range(1, 9)], [b"z" * 30, b"y" * 4]]
    cache = WithFeatures(contents)
    embeddings = set()
    skipped: set[str] = set()
    with stream_by(cache, kind, 12, 4, features=COLUMNS, token_features=["loudness"]) as stream:
        rows = len(stream.plan.rows(0, 0))
        for batch in made(stream, -(-rows // 4)):
            skipped |= set(batch.skipped)
            kept = batch.weights_BT > 0
            assert batch.features["loudness"].shape == batch.inputs_BT.shape
            assert batch.features["embedding"].shape[2:] == (2,)
            spoken = kept & (batch.inputs_BT != 255)
            assert np.allclose(
                batch.features["loudness"][spoken], batch.inputs_BT[spoken] / np.float32(10)
            )
            assert not batch.features["loudness"][kept & (batch.inputs_BT == 255)].any()
            slots = np.zeros_like(batch.positions_BT)
            if batch.documents_BT is not None:
                slots = batch.documents_BT
            for row, column in zip(*np.nonzero(spoken), strict=True):
                embedding = batch.features["embedding"][row, slots[row, column]]
                assert embedding[0] == batch.inputs_BT[row, column]
                embeddings.add(tuple(embedding.tolist()))
    assert skipped == {f"{cache.shards[0].sha256}#1"}, "a bad sample is passed over and named"
    wanted = {(each[0], len(each)) for documents in contents for each in documents}
    assert embeddings == wanted - {(2, 7)}


def test_samples_of_features_only_have_places_and_no_tokens() -> None:
    """As long as their first feature: here longer than a row, so that pieces go on."""

    class Frames(MemoryCache):
        def index(self, shard: Shard) -> np.ndarray:
            return np.array([[40]], dtype=np.int32)

    cache = Frames([[b""]])
    with stream_by(cache, "packed", 8, 2) as stream:
        batches = made(stream, 3)
    places = np.concatenate([each.positions_BT[each.weights_BT > 0] for each in batches])
    assert sorted(places.tolist()) == list(range(41))
    for each in batches:
        assert (each.inputs_BT == 255).all()
        assert (each.targets_BT == 255).all()


def test_token_features_that_do_not_fit_are_refused() -> None:
    cache = WithFeatures([[b"abcdef"], [b"ghij"]])
    with pytest.raises(InvalidInput, match="does not have"):
        stream_by(cache, "packed", 12, 4, features=COLUMNS, token_features=["pitch"])
    with stream_by(
        cache, "packed", 12, 4, features=COLUMNS, token_features=["embedding"]
    ) as stream:
        with pytest.raises(InvalidInput, match="not as long as its sample"):
            made(stream, 1)


def test_a_transform_that_changes_a_length_is_refused() -> None:
    class Changed(MemorySamples):
        def flat(self) -> None:
            return None

    class Longer(MemoryCache):
        def samples(self, shard: Shard) -> ShardSamples:
            return Changed([b"abcde", b"fgh"])

    cache = Longer([[b"abcd", b"efgh"]])
    with stream_by(cache, "packed", 8, 2) as stream:
        with pytest.raises(InvalidInput, match="length"):
            made(stream, 1)


def test_a_shard_that_its_index_does_not_fit_is_in_quarantine() -> None:
    class Other(MemoryCache):
        def samples(self, shard: Shard) -> ShardSamples:
            return MemorySamples(stored)

    stored = [b"abcd"]
    _refused(Other([[b"abcd", b"efgh"]]))
    stored = [b"abcde", b"fgh"]
    _refused(Other([[b"abcd", b"efgh"]]))


def _refused(cache: MemoryCache) -> None:
    with stream_by(cache, "packed", 8, 2, max_bad_share=0.99) as stream:
        with pytest.raises(DataRejected, match="too many"):
            made(stream, 1)
    assert list(cache.quarantined.values()) == ["shard and its index disagree"]


def test_lengths_that_cannot_be_read_stop_the_stream() -> None:
    """Ranks that plan from other lengths would train on other batches: no quarantine here."""

    class Unknown(MemoryCache):
        def index(self, shard: Shard) -> np.ndarray:
            raise CorruptData("index is corrupt")

    cache = Unknown([[b"abcd"]])
    with stream_by(cache, "packed", 8, 2) as stream:
        with pytest.raises(CorruptData, match="index is corrupt"):
            stream.next()


def test_windows_of_samples_with_features_are_refused(snapshot: Snapshot) -> None:
    record = snapshot.record.model_copy(update={"columns": tuple(COLUMNS)})
    with pytest.raises(InvalidInput, match="windows have no features"):
        open_stream(
            dataclasses.replace(snapshot, record=record),
            "train",
            MemoryCache([[b"a"]]),
            DataSettings(),
            context=8,
            global_batch=2,
            seed=0,
        )
