"""Data that never starves training: waste, waiting, exact resume, and other people's loaders.

    python benchmarks/data_stream.py [--quick] [--out FILE] [--peers PYTHON] [--only PART …]

Parts, all on one corpus of lognormal lengths (a median of 245 bytes) behind a real S3 server:

- waste: share of places without a token: packed, bucketed, padding to batch max, padding to cap;
- wait: how long a training loop of a small model waits for data, with 50 ms put before the server;
- resume: epochs begun on 2 ranks and ended on 1, 3 and 4: batches identical, nothing twice or lost;
- nodes: what 1, 2 and 4 nodes of a rank each fetch in an epoch, beside the data's size;
- peers: documents a second from a warm disk into batches, beside webdataset, litdata and
  mosaicml-streaming (``make peers``), each in its own format, each with its best number of workers.

Each part, and each way of batching in it, is printed as it ends (and kept in FILE): whatever ends
the whole loses nothing of what was found. ``--quick`` is what the tests run: a small corpus, no
peers.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from paceline.config import DataSettings  # noqa: E402
from paceline.data import (  # noqa: E402
    PlannedStream,
    ShardCache,
    Snapshot,
    build_snapshot,
    open_stream,
)
from paceline.storage import ObjectStore  # noqa: E402
from tests.support.latency import FarAway  # noqa: E402
from tests.support.rclone import RcloneS3, rclone_s3  # noqa: E402

KINDS = ("windows", "packed", "bucketed", "carried")
PARTS = ("waste", "wait", "resume", "nodes", "peers")
PEERS = ("webdataset", "litdata", "mosaicml-streaming")
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
LATENCY_S = 0.05
WASTE_CONTEXT = 2048
# Other loaders hand over whole documents from shards of a usual size: so do we, beside them.
PEERS_CONTEXT = 8192
PEERS_SHARD_BYTES = 4 << 20
SEPARATOR = b"\xff"


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    documents: int
    context: int
    batch: int
    shard_bytes: int
    steps: int  # of the training loop
    parameters: int
    rounds: int  # of the comparison with peers
    nodes: tuple[int, ...]
    columns: int  # that those read


FULL = Size(40_000, 256, 16, 32 * 1024, 600, 200_000, 5, (1, 2, 4, 8), 16)
QUICK = Size(200, 64, 6, 4 * 1024, 20, 20_000, 1, (1, 2, 3), 6)


@dataclass(frozen=True)
class Site:
    """A corpus in S3, and a directory for what comes from it."""

    s3: RcloneS3
    snapshot: Snapshot
    size: Size
    root: Path
    owned: contextlib.ExitStack
    stores: dict[int | None, ObjectStore] = dataclasses.field(default_factory=dict)

    def store(self, port: int | None = None) -> ObjectStore:
        """A store that asks the server, or the proxy at ``port``; its client is made, as that of a
        rank, which has read the snapshot's record by then."""
        url = self.s3.endpoint_url if port is None else f"http://127.0.0.1:{port}"
        if port not in self.stores:
            self.stores[port] = ObjectStore(
                endpoint_url=url, access_key=self.s3.access_key, secret_key=self.s3.secret_key
            )
            self.stores[port].warm_up()
        return self.stores[port]

    def cache(self, name: str, port: int | None = None) -> ShardCache:
        """A cache on this disk; a new name is an empty one. The site closes it."""
        where = self.root / "caches" / name
        return self.owned.enter_context(ShardCache(self.snapshot, self.store(port), where))

    def stream(
        self, kind: str, cache: ShardCache, columns: int = 0, **changes: Any
    ) -> PlannedStream:
        """The training stream of one way of batching."""
        shape = {"context": self.size.context, "global_batch": self.size.batch, "seed": 1}
        settings = DataSettings.model_validate({"batching": kind, "columns": columns})
        return open_stream(self.snapshot, "train", cache, settings, **(shape | changes))

    def documents(self) -> list[bytes]:
        """The train split's documents."""
        cache = self.cache("documents")
        found = []
        for shard in self.snapshot.of_split("train"):
            with cache.samples(shard) as samples:
                found += [samples.tokens(each).tobytes() for each in range(len(samples))]
        return found


@contextlib.contextmanager
def site(size: Size) -> Iterator[Site]:
    """A server with the corpus."""
    with tempfile.TemporaryDirectory(prefix="paceline-data-") as scratch, rclone_s3() as s3:
        root = Path(scratch)
        texts = root / "texts"
        texts.mkdir()
        random = np.random.default_rng(0)
        lengths = np.clip(random.lognormal(5.5, 1.2, size.documents), 12, 8000).astype(int)
        for number, length in enumerate(lengths.tolist()):
            body = random.integers(97, 123, length - 10, dtype=np.uint8).tobytes()
            (texts / f"{number:06d}.txt").write_bytes(b"%08d: " % number + body)
        store = s3.store()
        store.ensure_bucket("data")
        snapshot = snapshot_of(texts, size.shard_bytes, store, root)
        with contextlib.ExitStack() as owned:
            yield Site(s3, snapshot, size, root, owned)


def snapshot_of(texts: Path, shard_bytes: int, store: ObjectStore, root: Path) -> Snapshot:
    """Return the corpus in shards of another size; its splits are the same."""
    settings = DataSettings(
        max_bytes=1 << 30, shard_bytes=shard_bytes, held_out_share=0.02, purpose="bench"
    )
    return build_snapshot(str(texts), "s3://data/data", settings, store, work_dir=root)


# ------------------------------------------------------------------------------------- waste


def waste(at: Site) -> dict[str, float]:
    """Return the share of places without a token in one epoch, by way of batching."""
    context, batch = WASTE_CONTEXT, at.size.batch
    found: dict[str, float] = {}
    lengths = np.array([len(each) + 1 for each in at.documents()])
    # Padding has one document a row, cut as ours is where it is longer than the context.
    whole, rest = np.divmod(lengths, context)
    pieces = np.concatenate([np.full(int(whole.sum()), context), rest[rest > 0]])
    np.random.default_rng(1).shuffle(pieces)
    found["padding to cap"] = 1 - pieces.sum() / (len(pieces) * context)
    batches = [pieces[n : n + batch] for n in range(0, len(pieces), batch)]
    widest = sum(int(each.max()) * len(each) for each in batches)
    found["padding to batch max"] = 1 - pieces.sum() / widest
    for kind in ("bucketed", "packed", "carried"):
        tokens = places = 0.0
        with at.stream(kind, at.cache("waste"), context=context) as stream:
            for group in range(stream.plan.groups):
                rows = stream.plan.rows(0, group)
                tokens += float(rows.tokens_R1[-1])
                widths = rows.width_R
                places += len(rows) * context if widths is None else float(widths.sum())
        found[kind] = 1 - tokens / places
    return {name: round(float(value), 6) for name, value in found.items()}


# -------------------------------------------------------------------------------------- wait


def wait(at: Site, kind: str, latency_s: float) -> dict[str, Any]:
    """Train a small model from an empty cache, with ``latency_s`` before the server."""
    import torch

    from paceline.config import TrainingSettings
    from paceline.models import config_for, new_model
    from paceline.training.loop import Group, Progress, TransformerWorkload, new_optimizer, train
    from paceline.training.parallel import Mesh, MeshSpec, parallelise

    torch.set_num_threads(1)
    size = at.size
    settings = TrainingSettings(steps=size.steps, batch_sequences=size.batch)
    workload = TransformerWorkload(config_for(size.parameters, size.context))
    parallel = parallelise(new_model(workload.config, 0), Mesh(MeshSpec()), settings, workload)
    waits: list[float] = []
    port = urlsplit(at.s3.endpoint_url).port
    assert port is not None
    with (
        FarAway(port, latency_s) as far,
        at.stream(kind, at.cache(f"wait-{kind}", far.port)) as stream,
    ):
        started = time.perf_counter()
        train(
            parallel,
            workload,
            new_optimizer(parallel.modules, settings),
            stream,
            settings,
            Group(),
            progress=Progress(),
            on_step=lambda report: waits.append(report.figures["data_wait_s"]),
        )
        seconds = time.perf_counter() - started
        opened = len(list((at.root / "caches" / f"wait-{kind}").rglob("*.*")))
    later = seconds - waits[0]
    return {
        "latency_s": latency_s,
        "steps": size.steps,
        "step_s": round(later / size.steps, 5),
        "first_batch_s": round(waits[0], 3),
        "wait_share": round(sum(waits[1:]) / later, 6),
        "wait_share_with_first_batch": round(sum(waits) / seconds, 6),
        "worst_wait_s": round(max(waits[1:]), 4),
        "requests": far.requests,
        "injected_s": round(far.requests * latency_s, 2),
        "files_fetched": opened,
    }


# ------------------------------------------------------------------------------------ resume


def resume(at: Site, kind: str) -> dict[str, Any]:
    """Begin an epoch on 2 ranks, end it on 1, 3 and 4; count what is twice and what is missing."""
    cache = at.cache("resume")
    whole, _ = epoch_on(at, kind, cache, [(1, None)])
    half = len(whole) // 2
    found: dict[str, Any] = {"batches": len(whole)}
    wanted = expected(at, kind)
    for world in (1, 3, 4):
        batches, pieces = epoch_on(at, kind, cache, [(2, half), (world, None)])
        found[f"2 -> {world}"] = {
            "duplicates": sum((pieces - wanted).values()),
            "missing": sum((wanted - pieces).values()),
            "batches_identical": batches == whole,
        }
    return found


def expected(at: Site, kind: str) -> Counter[bytes]:
    """Return the pieces that an epoch should have, each as its inputs and last target."""
    context = at.size.context
    found: Counter[bytes] = Counter()
    if kind == "windows":
        cache = at.cache("documents")
        for shard in at.snapshot.of_split("train"):
            with cache.samples(shard) as samples:
                texts = [samples.tokens(each).tobytes() for each in range(len(samples))]
            framed = SEPARATOR + SEPARATOR.join(texts) + SEPARATOR
            starts = range(0, len(framed) - context, context)
            found.update(framed[start : start + context + 1] for start in starts)
        return found
    for each in at.documents():
        framed = SEPARATOR + each + SEPARATOR
        found.update(
            framed[start : start + context + 1] for start in range(0, len(framed) - 1, context)
        )
    return found


def epoch_on(
    at: Site, kind: str, cache: ShardCache, stages: list[tuple[int, int | None]]
) -> tuple[list[str], Counter[bytes]]:
    """Return digests of an epoch's global batches, and its pieces, read stage by stage.

    A stage is a number of ranks and how many batches they read; None: to the epoch's end.
    """
    digests: list[str] = []
    pieces: Counter[bytes] = Counter()
    position: dict[str, Any] | None = None
    for world, count in stages:
        ranks = [
            at.stream(kind, cache, rank=rank, world_size=world, position=position)
            for rank in range(world)
        ]
        read = 0
        while count is None or read < count:
            shares = [each.next() for each in ranks]
            position = json.loads(json.dumps(ranks[0].position))
            assert all(each.position == position for each in ranks)
            # The last batch goes on into the next epoch: those rows are not this epoch's.
            beyond = position["item"] if position["epoch"] else 0
            digests.append(digest_of(shares, position["global_batch"] - beyond))
            for share in shares:
                for row in range(len(share.rows)):
                    if share.rows[row] < position["global_batch"] - beyond:
                        pieces.update(pieces_of(share, row))
            read += 1
            if position["epoch"]:
                break
        for each in ranks:
            each.close()
    return digests, pieces


def digest_of(shares: list[Any], rows: int) -> str:
    """Return a digest of a global batch: every array of its first ``rows`` rows."""
    digest = hashlib.sha256(f"{shares[0].step} {shares[0].global_tokens} {rows}".encode())
    for name in ("inputs_BT", "targets_BT", "weights_BT", "documents_BT", "positions_BT"):
        parts = [getattr(each, name) for each in shares]
        if parts[0] is not None:
            digest.update(np.concatenate(parts)[:rows].tobytes())
    return digest.hexdigest()


def pieces_of(batch: Any, row: int) -> list[bytes]:
    """Return the pieces of documents in one row: their inputs and last target."""
    kept = batch.weights_BT[row] > 0
    slots = np.zeros(len(kept), dtype=np.int64)
    if batch.documents_BT is not None:
        slots = batch.documents_BT[row]
    found = []
    for slot in np.unique(slots[kept]).tolist():
        mine = kept & (slots == slot)
        last = int(np.flatnonzero(mine)[-1])
        found.append(batch.inputs_BT[row][mine].tobytes() + bytes([batch.targets_BT[row, last]]))
    return found


# ------------------------------------------------------------------------------------- nodes


def nodes(at: Site, kind: str) -> dict[str, Any]:
    """Read an epoch on so many nodes, each with a cache of its own; return the bytes of shards that
    they fetched together, and the busiest one, as shares of the data."""
    whole = sum(each.bytes for each in at.snapshot.of_split("train"))
    found: dict[str, Any] = {}
    for columns in (1, at.size.columns):
        for world in at.size.nodes:
            fetched = []
            for rank in range(world):
                cache = at.cache(f"nodes-{kind}-{columns}-{world}-{rank}")
                with at.stream(kind, cache, columns, rank=rank, world_size=world) as stream:
                    while stream.position["epoch"] == 0:
                        stream.next()
                fetched.append(cache.fetched_bytes / whole)
            found[f"{world} nodes, {columns} columns"] = {
                "together": round(sum(fetched), 3),
                "busiest": round(max(fetched), 3),
            }
    return found


# ------------------------------------------------------------------------------------- peers


class Peers:
    """The process with other people's loaders."""

    def __init__(self, python: Path) -> None:
        self._process = subprocess.Popen(
            [str(python), str(ROOT / "benchmarks" / "peers" / "data_readers.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Return the answer to one request."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        if "error" in answer:
            raise SystemExit(f"{request['reader']}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def ours(at: Site, kind: str) -> dict[str, Any]:
    """Read one epoch from a warm cache: every shard verified, order mixed, batches made."""
    tokens = 0
    with at.stream(kind, at.cache("peers"), context=PEERS_CONTEXT) as stream:
        started = time.perf_counter()
        while stream.position["epoch"] == 0:
            batch = stream.next()
            tokens += int(batch.weights_BT.sum())
        seconds = time.perf_counter() - started
    documents = sum(each.documents for each in at.snapshot.of_split("train"))
    return {"documents": documents, "tokens": tokens, "seconds": seconds}


def peers(at: Site, python: Path, rounds: int) -> dict[str, Any]:
    """Return documents a second of each, in interleaved rounds, with its best worker count."""
    usual = snapshot_of(at.root / "texts", PEERS_SHARD_BYTES, at.store(), at.root)
    at = dataclasses.replace(at, snapshot=usual)
    corpus = at.root / "documents.bin"
    documents = at.documents()
    corpus.write_bytes(b"".join(documents))
    np.save(f"{corpus}.npy", np.cumsum([len(each) for each in documents]))
    process = Peers(python)
    found: dict[str, Any] = {"documents": len(documents)}
    try:
        for kind in ("bucketed", "packed"):
            ours(at, kind)  # fills the cache
        workers: dict[str, int] = {}
        for reader in PEERS:
            to = at.root / "peers" / reader
            process.ask(do="write", reader=reader, documents=str(corpus), to=str(to))
            rates = {}
            for count in (0, 1, 2):  # twice, the second counts: the first finds caches cold
                for _ in range(2):
                    got = process.ask(
                        do="epoch", reader=reader, of=str(to), workers=count, batch=at.size.batch
                    )
                assert got["documents"] == len(documents), (reader, got)
                rates[count] = got["documents"] / got["seconds"]
            workers[reader] = max(rates, key=lambda each: rates[each])
        runs: dict[str, list[float]] = {}
        for number in range(rounds):
            names = [*PEERS, "paceline bucketed", "paceline packed"]
            for name in names[number % len(names) :] + names[: number % len(names)]:
                if name in PEERS:
                    got = process.ask(
                        do="epoch",
                        reader=name,
                        of=str(at.root / "peers" / name),
                        workers=workers[name],
                        batch=at.size.batch,
                    )
                else:
                    got = ours(at, name.split()[1])
                runs.setdefault(name, []).append(got["documents"] / got["seconds"])
    finally:
        process.close()
    for name, rates_s in runs.items():
        found[name] = {
            "documents_per_s": round(statistics.median(rates_s)),
            "worst": round(min(rates_s)),
            "best": round(max(rates_s)),
            "workers": workers.get(name),
        }
    return found


@dataclass
class Report:
    """What is known so far: each part is printed, and kept in a file, as it ends."""

    known: dict[str, Any]
    out: Path | None

    def add(self, part: str, found: Any, kind: str = "") -> None:
        """Add what a part found, of one way of batching where it goes by these."""
        before = self.known.get(part)  # "nodes" is a size, too
        whole = {**(before if isinstance(before, dict) else {}), kind: found} if kind else found
        self.known[part] = whole
        self.say({"part": part, **({"kind": kind} if kind else {}), "found": found})

    def say(self, line: dict[str, Any]) -> None:
        """Print one line of JSON, and write all that is known."""
        print(json.dumps({"benchmark": self.known["benchmark"], **line}), flush=True)
        if self.out is not None:
            self.out.write_text(json.dumps(self.known, indent=2) + "\n")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the parts; print a line of JSON as each ends, and one of all at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peers", type=Path, default=PEERS_PYTHON)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    asked = parser.parse_args(arguments)
    size = QUICK if asked.quick else FULL
    report = Report({"benchmark": "data_stream", "quick": asked.quick, **vars(size)}, asked.out)
    with site(size) as at:
        train = at.snapshot.of_split("train")
        report.add("train_documents", sum(each.documents for each in train))
        report.add("shards", len(train))
        for part in PARTS:
            if part in asked.only:
                run(part, at, report, asked.quick, asked.peers)
    report.say(report.known)
    return report.known


def run(part: str, at: Site, report: Report, quick: bool, python: Path) -> None:
    """Run one part, of each way of batching that it goes by."""
    if part == "waste":
        report.add(part, waste(at))
    elif part == "wait":
        for kind in KINDS[1:2] if quick else KINDS[:3]:
            report.add(part, wait(at, kind, LATENCY_S), kind)
    elif part == "resume":
        for kind in KINDS[:2] if quick else KINDS:
            report.add(part, resume(at, kind), kind)
    elif part == "nodes":
        for kind in KINDS[1:2] if quick else KINDS:
            report.add(part, nodes(at, kind), kind)
    elif part == "peers" and not quick:
        report.add(part, peers(at, python, at.size.rounds))


if __name__ == "__main__":
    main()
