"""The node's cache: verified, bounded, shared, pinned, and right after any process dies."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.data import ShardCache, Snapshot
from paceline.data.loading import CachedFile, DiskCache, Fetcher, PartialFile
from paceline.errors import (
    CorruptData,
    InvalidInput,
    InvalidSnapshot,
    ServiceUnavailable,
    StorageFull,
)
from paceline.storage import DiskStore

KIB = 1024


def put(cache: DiskCache, name: str, data: bytes) -> CachedFile:
    with cache.making(name, len(data)) as part:
        assert isinstance(part, PartialFile)
        part.write(0, memoryview(data))
        return part.commit()


# ── the disk ─────────────────────────────────────────────────────────────────────────────────────


def test_the_file_that_was_not_used_for_longest_goes_and_one_in_use_never(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 3 * KIB)
    for name in "abc":
        put(cache, name, name.encode() * KIB).close()
        time.sleep(0.002)  # file systems keep time in steps
    used = cache.open("a")
    assert used is not None
    time.sleep(0.002)
    put(cache, "d", b"d" * KIB).close()
    assert sorted(each.name for each in tmp_path.glob("[a-z]")) == ["a", "c", "d"]
    put(cache, "e", b"e" * 2 * KIB).close()
    assert sorted(each.name for each in tmp_path.glob("[a-z]")) == ["a", "e"]
    assert cache.used_bytes() == 3 * KIB
    used.close()
    put(cache, "f", b"f" * 3 * KIB).close()
    assert [each.name for each in tmp_path.glob("[a-z]")] == ["f"]


def test_where_everything_is_in_use_a_file_is_read_and_gone(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 2 * KIB)
    first = put(cache, "a", b"a" * 2 * KIB)
    second = put(cache, "b", b"b" * KIB)
    assert bytes(second.map()) == b"b" * KIB
    assert cache.used_bytes() == 2 * KIB, "it has no name, so that it goes when it is closed"
    assert cache.open("b") is None
    assert bytes(first.map()) == b"a" * 2 * KIB
    with pytest.raises(InvalidInput, match="smaller than one file"):
        put(cache, "c", b"c" * 3 * KIB)


def test_memory_stays_good_when_its_file_is_closed_and_removed(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, KIB)
    held = put(cache, "a", b"a" * KIB)
    view = np.frombuffer(held.map(), np.uint8)
    held.close()
    put(cache, "b", b"b" * KIB).close()
    assert cache.open("a") is None
    assert set(view.tolist()) == {ord("a")}


def test_a_part_that_fails_leaves_nothing(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 4 * KIB)
    with pytest.raises(RuntimeError), cache.making("a", KIB) as part:
        assert isinstance(part, PartialFile)
        assert cache.used_bytes() == KIB, "room is taken while it is made"
        raise RuntimeError
    assert cache.used_bytes() == 0
    assert cache.open("a") is None


def test_a_full_disk_is_an_error_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path, 8 * KIB)
    put(cache, "a", b"a" * KIB).close()
    calls = []

    def full(descriptor: int, offset: int, size: int) -> None:
        calls.append(size)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageFull, match="no room for the data cache"):
        put(cache, "b", b"b" * KIB)
    assert len(calls) == 2, "what could be removed was removed first"
    assert cache.used_bytes() == 0
    assert not list(tmp_path.glob(".*.part"))


def _reader(directory: str, limit: int, seed: int, out: Any) -> None:
    """Make and read files of a cache that is much too small for all of them."""
    cache = DiskCache(Path(directory), limit)
    made = wrong = 0
    order = np.random.default_rng(seed).integers(0, 12, 150)
    for number in order.tolist():
        name, wanted = f"f{number}", bytes([number]) * (KIB + number)
        held = cache.open(name)
        if held is None:
            with cache.making(name, len(wanted)) as part:
                if isinstance(part, CachedFile):
                    held = part
                else:
                    part.write(0, memoryview(wanted))
                    made += 1
                    held = part.commit()
        wrong += bytes(held.map()) != wanted
        held.close()
    out.put((made, wrong))


def test_processes_share_the_cache_and_never_see_half_a_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    readers = [
        context.Process(target=_reader, args=(str(tmp_path), 6 * KIB, seed, out))
        for seed in range(3)
    ]
    for each in readers:
        each.start()
    found = [out.get(timeout=60) for _ in readers]
    for each in readers:
        each.join(30)
    assert sum(wrong for _, wrong in found) == 0
    assert sum(made for made, _ in found) > 12, "the cache is too small, so files are made again"
    assert DiskCache(tmp_path, 6 * KIB).used_bytes() <= 6 * KIB


def test_a_waiting_process_does_not_wait_until_the_writer_closes_its_file(tmp_path: Path) -> None:
    """Two ranks of a node: the one that wrote a shard uses it while it waits for the other."""
    writer, waiter = DiskCache(tmp_path, 8 * KIB), DiskCache(tmp_path, 8 * KIB)
    with ThreadPoolExecutor(1) as pool:

        def read() -> bytes:
            with waiter.making("a", KIB) as found:
                assert isinstance(found, CachedFile)
                return bytes(found.map())

        with writer.making("a", KIB) as part:
            assert isinstance(part, PartialFile)
            blocked = re.compile(rf"-> FLOCK .*:{part.path.stat().st_ino} ")
            waiting = pool.submit(read)
            while not blocked.search(Path("/proc/locks").read_text()):
                time.sleep(0.01)
            part.write(0, memoryview(b"a" * KIB))
            held = part.commit()
        try:
            assert waiting.result(timeout=20) == b"a" * KIB
        finally:
            held.close()


DYING = """
import sys, time
from pathlib import Path
from paceline.data.loading.cache import DiskCache
cache = DiskCache(Path(sys.argv[1]), 4096)
held = cache.open("kept")
with cache.making("half", 2048) as part:
    part.write(0, memoryview(b"x" * 1024))
    print("ready", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_process_left_is_neither_room_nor_in_use(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 4 * KIB)
    put(cache, "kept", b"k" * KIB).close()
    process = subprocess.Popen(
        [sys.executable, "-c", DYING, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "ready\n"
        assert cache.used_bytes() == 3 * KIB, "half a file takes its room"
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert cache.used_bytes() == KIB, "a dead process's part is removed"
    held = put(cache, "half", b"h" * 2 * KIB)
    assert bytes(held.map()) == b"h" * 2 * KIB
    held.close()
    put(cache, "all", b"a" * 4 * KIB).close()
    assert cache.open("kept") is None, "what the dead process read is not in use"


# ── shards ───────────────────────────────────────────────────────────────────────────────────────


def tokens_of(cache: ShardCache, snapshot: Snapshot) -> dict[str, bytes]:
    found = {}
    for _, samples in cache.opened(snapshot.shards):
        assert not isinstance(samples, CorruptData)
        found |= {samples.key(i): samples.tokens(i).tobytes() for i in range(len(samples))}
    return found


class Counting(DiskStore):
    """Counts reads, can be slow for some, and can be away."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.running = self.most = 0
        self.away = False
        self.stuck: dict[str, int] = {}  # how many of the next requests for it do not come
        self.freed = threading.Event()
        self._mutex = threading.Lock()

    def stream_range(self, url: str, offset: int, view: memoryview, **more: Any) -> Any:
        with self._mutex:
            self.reads.append(url)
            self.running += 1
            self.most = max(self.most, self.running)
            stuck = self.stuck.get(url, 0) > 0
            self.stuck[url] = self.stuck.get(url, 0) - 1
        try:
            if self.away:
                raise ServiceUnavailable("S3 does not answer")
            if stuck:
                self.freed.wait(30)
            time.sleep(0.002)
            yield from super().stream_range(url, offset, view, **more)
        finally:
            with self._mutex:
                self.running -= 1


def test_a_shard_is_fetched_once_and_then_read_from_this_disk(
    snapshot: Snapshot, texts: Path, tmp_path: Path
) -> None:
    store = Counting()
    limit = sum(sorted(each.bytes for each in snapshot.shards)[-5:])
    with ShardCache(snapshot, store, tmp_path / "small", limit_bytes=limit) as cache:
        assert len(tokens_of(cache, snapshot)) == 40
        assert DiskCache(tmp_path / "small", limit).used_bytes() <= limit
    store.most = 0
    with ShardCache(snapshot, store, tmp_path / "cache") as cache:
        first = tokens_of(cache, snapshot)
        assert first == {each.name: each.read_bytes() for each in texts.iterdir()}
        assert cache.fetched == len(snapshot.shards)
        assert 1 < store.most <= 4, "a few shards ahead, side by side, and no more"
        assert tokens_of(cache, snapshot) == first
        assert cache.fetched == len(snapshot.shards)
        assert cache.verify_s > 0
    store.away = True
    with ShardCache(snapshot, store, tmp_path / "cache") as cache:
        assert tokens_of(cache, snapshot) == first, "another process needs no store"


@pytest.mark.parametrize("damage", ["flipped", "short", "long", "missing"])
def test_a_bad_shard_is_in_quarantine_with_its_reason_and_asked_for_once(
    snapshot: Snapshot, tmp_path: Path, damage: str
) -> None:
    victim, other = snapshot.of_split("train")[:2]
    path = tmp_path / "store" / "shards" / victim.name
    good = bytearray(path.read_bytes())
    good[len(good) // 2] ^= 1
    if damage == "missing":
        path.unlink()
    else:
        bad = {"flipped": good, "short": good[:-9], "long": good + b"x"}[damage]
        path.write_bytes(bad)
    with ShardCache(snapshot, DiskStore(), tmp_path / "cache") as cache:
        for _ in range(2):
            with pytest.raises(CorruptData, match="data shard is corrupt"):
                cache.samples(victim)
        reason = "missing from the store" if damage == "missing" else "do not match its digest"
        assert reason in cache.quarantined[victim.sha256]
        assert len(cache.samples(other)) == other.samples
        assert cache.lengths(victim).sum() == victim.tokens, "its lengths are known all the same"
    assert not (tmp_path / "cache" / victim.name).exists()
    assert not list((tmp_path / "cache").glob(".*.part"))


def test_a_damaged_cache_is_healed_from_the_shard_lengths_included(
    snapshot: Snapshot, tmp_path: Path
) -> None:
    shard = snapshot.shards[0]
    with ShardCache(snapshot, DiskStore(), tmp_path / "cache") as cache:
        lengths = cache.lengths(shard)
        with cache.samples(shard) as samples:
            assert [len(samples.tokens(i)) for i in range(len(samples))] == lengths.tolist()
            assert samples.lengths().tolist() == lengths.tolist()
        cached = tmp_path / "cache" / shard.name
        cached.write_bytes(cached.read_bytes()[:-1] + b"?")
        cache.samples(shard).close()
        assert hashlib.sha256(cached.read_bytes()).hexdigest() == shard.sha256
        small = tmp_path / "cache" / shard.lengths_name
        small.write_bytes(b"\0" * small.stat().st_size)
        assert cache.lengths(shard).tolist() == lengths.tolist()
        (tmp_path / "store" / "shards" / shard.lengths_name).write_bytes(b"nothing")
        small.unlink()
        assert cache.lengths(shard).tolist() == lengths.tolist()
        assert not cache.quarantined
        assert [cache.lengths(each).sum() for each in snapshot.shards] == [
            each.tokens for each in snapshot.shards
        ]


def test_a_store_that_is_away_puts_nothing_in_quarantine(
    snapshot: Snapshot, tmp_path: Path
) -> None:
    store = Counting()
    store.away = True
    shard = snapshot.shards[0]
    with ShardCache(snapshot, store, tmp_path / "cache") as cache:
        with pytest.raises(ServiceUnavailable):
            cache.samples(shard)
        assert not cache.quarantined
        store.away = False
        assert len(cache.samples(shard)) == shard.samples


def test_a_slow_answer_is_asked_for_again_on_another_connection(
    snapshot: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Counting()
    url = snapshot.shard_url(snapshot.shards[0])
    size = snapshot.shards[0].bytes
    monkeypatch.setattr("paceline.data.loading.fetch.HEDGE_START_S", 0.05)
    fetcher = Fetcher(store, connections=8)
    try:
        store.stuck[url] = 1
        got = bytearray(size)

        def write(offset: int, data: memoryview) -> None:
            got[offset : offset + len(data)] = data

        fetcher.fetch(url, size, write)
        assert hashlib.sha256(got).hexdigest() == snapshot.shards[0].sha256
        assert (fetcher.requests, fetcher.hedges) == (1, 1)
        for _ in range(20):
            fetcher.fetch(url, size, write)
        assert fetcher.hedges == 1, "only what is slow is asked for twice"
        assert fetcher.deadline_s() < 0.5, "from the median, by now"
        for hedges in (2, 3, 4):
            store.stuck[url] = 1
            fetcher.fetch(url, size, write)
            assert fetcher.hedges == hedges
        store.stuck[url] = 1
        thread = threading.Thread(target=fetcher.fetch, args=(url, size, write), daemon=True)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive(), "a tenth of the requests is all: this one waits"
        assert fetcher.hedges == 4
        store.freed.set()
        thread.join(30)
        assert not thread.is_alive()
    finally:
        store.freed.set()
        fetcher.close()


def test_a_large_shard_comes_in_ranges_over_several_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.data.loading.fetch.RANGE_BYTES", 64 * KIB)
    store = Counting()
    data = np.random.default_rng(0).bytes(1_000_001)
    url = DiskStore.url_of(tmp_path / "large")
    store.put_bytes(url, data)
    got = bytearray(len(data))
    fetcher = Fetcher(store, connections=8)
    try:
        fetcher.fetch(
            url, len(data), lambda at, part: got.__setitem__(slice(at, at + len(part)), part)
        )
        assert got == data
        assert len(store.reads) == 16
        assert 1 < store.most <= 4, "four ranges of one object are in memory at most"
        with pytest.raises(CorruptData):
            fetcher.fetch(url, len(data) - 1, lambda at, part: None)
    finally:
        fetcher.close()


def test_a_cache_is_opened_for_its_purpose_only(snapshot: Snapshot, tmp_path: Path) -> None:
    with pytest.raises(InvalidSnapshot, match="another purpose"):
        ShardCache(snapshot, DiskStore(), tmp_path / "c", purpose="medical")
    with pytest.raises(InvalidSnapshot, match="another project"):
        ShardCache(snapshot, DiskStore(), tmp_path / "c", purpose="tests", project="elsewhere")
    assert not (tmp_path / "c").exists()
