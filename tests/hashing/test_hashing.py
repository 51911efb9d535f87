"""Several messages at once have the digests that hashlib gives them one by one."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import threading
import time
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import hashing
from paceline.hashing import WITHOUT, Bytes, Hash, digests, proven, sha256, update_each

compiled = pytest.mark.skipif(hashing.LANES == 1, reason=f"no extension here: {hashing.ENGINE}")

# Around the edges of blocks of 64 bytes and of the padding (56), and long enough for all lanes.
sizes = st.one_of(
    st.sampled_from([0, 1, 55, 56, 63, 64, 65, 119, 120, 127, 128, 129]), st.integers(0, 3000)
)
SOURCE = bytes((7 * each * each + each // 251) % 256 for each in range(8192))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 63), sizes), max_size=24))
def test_any_messages_in_any_order_and_alignment(work: list[tuple[int, int, int]]) -> None:
    ours, theirs = [sha256() for _ in range(6)], [hashlib.sha256() for _ in range(6)]
    half = len(work) // 2
    for part in (work[:half], work[half:]):  # what was begun goes on
        blocks = [(number, memoryview(SOURCE)[at : at + size]) for number, at, size in part]
        update_each([(ours[number], block) for number, block in blocks])
        for number, block in blocks:
            theirs[number].update(block)
        assert [each.digest() for each in ours] == [each.digest() for each in theirs]
    assert [each.hexdigest() for each in ours] == [each.hexdigest() for each in theirs]


@given(st.lists(st.binary(max_size=300), max_size=9))
def test_digests_of_blocks(blocks: list[bytes]) -> None:
    assert digests(blocks) == [hashlib.sha256(block).hexdigest() for block in blocks]


@pytest.mark.parametrize("lengths", [(0,), (0, 200_001), (1 << 20, 999_999), (70_000,) * 5])
def test_messages_of_different_lengths(lengths: tuple[int, ...]) -> None:
    blocks = [os.urandom(length) for length in lengths]
    assert digests(blocks) == [hashlib.sha256(block).hexdigest() for block in blocks]


def test_a_digest_may_be_asked_for_and_more_may_follow() -> None:
    each = sha256()
    for part in (b"a" * 63, b"", b"b", b"c" * 200):
        each.update(part)
        each.digest()
    assert each.hexdigest() == hashlib.sha256(b"a" * 63 + b"b" + b"c" * 200).hexdigest()


@compiled
def test_what_is_no_message_is_refused_and_nothing_is_hashed() -> None:
    each = sha256()
    for work in ([(each, b"x"), (each, "text")], [(each, b"x"), (hashlib.sha256(), b"x")], [3]):
        with pytest.raises(TypeError):
            update_each(work)  # type: ignore[arg-type]
    with pytest.raises(BufferError):
        update_each([(each, memoryview(b"abcdef")[::2])])
    assert each.hexdigest() == hashlib.sha256().hexdigest()
    each.update(memoryview(array("I", [1, 2])))  # bytes as they lie
    assert each.digest() == hashlib.sha256(array("I", [1, 2]).tobytes()).digest()


@compiled
def test_others_run_while_it_hashes() -> None:
    each, data, over = sha256(), bytes(32 << 20), threading.Event()

    def hash_on() -> None:
        while not over.is_set():
            update_each([(each, data)])

    thread = threading.Thread(target=hash_on)
    thread.start()
    end_s, seen = time.monotonic() + 20, False
    try:
        # Only while the other thread is in there without the GIL can its hash be found in use.
        while not seen and time.monotonic() < end_s:
            try:
                each.digest()
            except ValueError as error:
                seen = "another thread" in str(error)
            time.sleep(0.001)
    finally:
        over.set()
        thread.join(20)
    assert seen


def test_the_environment_can_do_without_the_extension() -> None:
    code = "from paceline import hashing; print(hashing.ENGINE, hashing.digests([b'abc'])[0])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, WITHOUT: "hashlib"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split()[0] == "hashlib"
    assert done.stdout.split()[-1] == hashlib.sha256(b"abc").hexdigest()


def test_an_engine_with_wrong_digests_is_not_taken() -> None:
    class Wrong:
        def __init__(self) -> None:
            self._right = hashlib.sha256()

        def update(self, data: Bytes) -> None:
            self._right.update(data)

        def digest(self) -> bytes:
            return self._right.digest()[::-1]

        def hexdigest(self) -> str:
            return self.digest().hex()

    def one_by_one(work: list[tuple[Hash, Bytes]]) -> None:
        for each, data in work:
            each.update(data)

    assert hashing._works(hashlib.sha256, one_by_one)
    assert hashing._works(sha256, update_each)
    assert not hashing._works(Wrong, one_by_one)
    assert not hashing._works(hashlib.sha256, lambda work: one_by_one(work[1:]))


def test_only_hashlib_says_that_bytes_are_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted, wrong = hashlib.sha256(b"right").hexdigest(), hashlib.sha256(b"wrong").hexdigest()
    monkeypatch.setattr(hashing, "LANES", 4)
    assert proven(wanted, wanted, lambda: pytest.fail("a match is a proof"))
    assert not proven(wrong, wanted, lambda: [b"wrong"])
    assert not caplog.records
    with caplog.at_level(logging.ERROR):
        assert proven(wrong, wanted, lambda: [b"ri", b"ght"])
    assert "wrong digest" in caplog.text
