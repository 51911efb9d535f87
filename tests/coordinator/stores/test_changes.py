"""Changes of keys in etcd: settled ones do the same as the ones they were made of."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from paceline.coordinator.stores import Delete, KeyLayout, Put, after_prefix, pack, unpack
from paceline.coordinator.stores.etcd import (
    INLINE_BYTES,
    MAX_TXN_BYTES,
    MAX_TXN_OPS,
    Blob,
    batches,
    blob_named,
    join_blob,
    normalize_changes,
    read_journal,
    write_journal,
)
from paceline.errors import CorruptData

keys = st.binary(min_size=1, max_size=2).map(lambda raw: bytes(97 + each % 4 for each in raw))
changes = st.lists(st.one_of(st.builds(Put, keys, keys), st.builds(Delete, keys, keys)))


def carried_out(some, state):
    state = dict(state)
    for each in some:
        if isinstance(each, Put):
            state[each.key] = each.value
        else:
            state = {k: v for k, v in state.items() if not each.start <= k < each.end}
    return state


@given(changes, st.dictionaries(keys, keys))
def test_settled_changes_do_the_same_in_any_order(some, before):
    settled, blobs = normalize_changes(some)
    assert blobs == []
    wanted = carried_out(some, before)
    assert carried_out(settled, before) == wanted
    assert carried_out(reversed(settled), before) == wanted
    assert carried_out([*settled, *settled], before) == wanted  # a journal done twice
    assert read_journal(write_journal(settled)) == settled


@given(st.binary(max_size=2_000))
def test_a_value_is_unpacked_to_what_it_was(raw):
    assert unpack(pack(raw)) == raw
    assert blob_named(pack(raw)) is None


def test_a_batch_fits_into_one_transaction_of_etcd():
    some = [Put(b"%d" % n, b"x" * (60_000 if n % 7 == 0 else 10)) for n in range(500)]
    found = batches(some)
    assert [each for batch in found for each in batch] == some
    assert all(len(batch) < MAX_TXN_OPS for batch in found)
    assert all(sum(len(e.key) + len(e.value) for e in batch) < MAX_TXN_BYTES for batch in found)
    assert len(found) < 10


def test_a_long_value_becomes_a_blob_and_a_changed_blob_is_noticed():
    value = bytes(range(256)) * (INLINE_BYTES // 256 + 5_000)
    settled, (blob,) = normalize_changes([Put(b"k", value)])
    assert blob_named(settled[0].value) == (blob.digest, len(blob.parts))
    assert join_blob(blob.digest, blob.parts) == value
    assert Blob.of(value) == blob
    with pytest.raises(CorruptData):
        join_blob(blob.digest, (*blob.parts[:-1], b"x"))


@settings(max_examples=30)
@given(st.lists(st.text(min_size=1), min_size=2, max_size=4))
def test_names_of_any_letters_are_found_in_a_key_again(names):
    layout = KeyLayout("/paceline/x")
    key = layout.key("state", *names)
    assert layout.parts_of(key) == ["state", *names]
    start, end = layout.below("state")
    assert start <= key < end
    assert end == after_prefix(start)
