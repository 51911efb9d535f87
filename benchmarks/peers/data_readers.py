"""Other people's data loaders on the same documents: each in its own format, each told to shuffle.

A process that benchmarks/data_stream.py starts with the Python of ``.venv-peers``; it reads lines
of JSON on standard input and answers each with one:

    {"do": "write", "reader": "webdataset", "documents": "FILE", "to": "DIRECTORY"}
    {"do": "epoch", "reader": "webdataset", "of": "DIRECTORY", "workers": 1, "batch": 16}

What an epoch counts is documents in batches, each batch's documents padded to its longest: the
least that a training loop needs. FILE holds documents in one piece, FILE.npy their ends.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tarfile
import time
import types
from pathlib import Path
from typing import Any

import numpy as np

PER_SHARD_BYTES = 4 << 20


def documents_of(path: str) -> list[bytes]:
    """The documents, in order."""
    data, ends = Path(path).read_bytes(), np.load(f"{path}.npy").tolist()
    return [data[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def padded(documents: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """A batch: tokens and weights, as wide as the longest document."""
    width = max(map(len, documents))
    tokens = np.zeros((len(documents), width), dtype=np.uint8)
    weights = np.zeros((len(documents), width), dtype=np.float32)
    for row, each in enumerate(documents):
        tokens[row, : len(each)] = each
        weights[row, : len(each)] = 1.0
    return tokens, weights


# ------------------------------------------------------------------------------- webdataset


def write_webdataset(documents: list[bytes], to: Path) -> None:
    before = np.cumsum([0, *map(len, documents)])[:-1]
    shards = before // PER_SHARD_BYTES
    for shard in np.unique(shards).tolist():
        with tarfile.open(to / f"shard-{shard:05d}.tar", "w") as tar:
            for number in np.flatnonzero(shards == shard).tolist():
                member = tarfile.TarInfo(f"{number:08d}.bin")
                member.size = len(documents[number])
                tar.addfile(member, io.BytesIO(documents[number]))


def open_webdataset(of: Path, workers: int, batch: int) -> Any:
    import webdataset

    shards = sorted(str(each) for each in of.glob("*.tar"))
    dataset = (
        webdataset.WebDataset(
            shards,
            shardshuffle=len(shards),
            seed=0,
            nodesplitter=None,
            workersplitter=webdataset.split_by_worker,
            empty_check=False,
        )
        .shuffle(1000)
        .map(lambda sample: np.frombuffer(sample["bin"], dtype=np.uint8))
        .batched(batch, collation_fn=padded, partial=True)
    )
    return webdataset.WebLoader(dataset, batch_size=None, num_workers=workers)


# ---------------------------------------------------------------------------------- litdata


def write_litdata(documents: list[bytes], to: Path) -> None:
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(to), chunk_bytes=PER_SHARD_BYTES)
    for number, each in enumerate(documents):
        writer[number] = np.frombuffer(each, dtype=np.uint8)
    writer.done()
    writer.merge()


def open_litdata(of: Path, workers: int, batch: int) -> Any:
    import litdata

    dataset = litdata.StreamingDataset(str(of), shuffle=True, drop_last=False, seed=0)
    return litdata.StreamingDataLoader(
        dataset, batch_size=batch, num_workers=workers, collate_fn=padded
    )


# ------------------------------------------------------------------------ mosaicml-streaming


def _streaming() -> Any:
    # Its vision datasets need torchvision, whose wheel does not fit a torch for CPUs: left out.
    sys.modules.setdefault("streaming.vision", types.ModuleType("streaming.vision"))
    import streaming

    return streaming


def write_streaming(documents: list[bytes], to: Path) -> None:
    columns = {"text": "ndarray:uint8"}
    with _streaming().MDSWriter(out=str(to), columns=columns, size_limit=PER_SHARD_BYTES) as out:
        for each in documents:
            out.write({"text": np.frombuffer(each, dtype=np.uint8)})


def open_streaming(of: Path, workers: int, batch: int) -> Any:
    streaming = _streaming()
    streaming.base.util.clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(
        local=str(of), shuffle=True, shuffle_seed=0, batch_size=batch, num_canonical_nodes=1
    )
    return streaming.StreamingDataLoader(
        dataset,
        batch_size=batch,
        num_workers=workers,
        collate_fn=lambda samples: padded([each["text"] for each in samples]),
    )


WRITERS = {
    "webdataset": write_webdataset,
    "litdata": write_litdata,
    "mosaicml-streaming": write_streaming,
}
OPENERS = {
    "webdataset": open_webdataset,
    "litdata": open_litdata,
    "mosaicml-streaming": open_streaming,
}


def write(request: dict[str, Any]) -> dict[str, Any]:
    """Write the documents in the reader's own format; return how long it took."""
    to = Path(request["to"])
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    started = time.perf_counter()
    WRITERS[request["reader"]](documents_of(request["documents"]), to)
    return {
        "seconds": time.perf_counter() - started,
        "bytes": sum(each.stat().st_size for each in to.rglob("*") if each.is_file()),
    }


def epoch(request: dict[str, Any]) -> dict[str, Any]:
    """Read one epoch; the clock starts with the first request for a batch, workers included."""
    loader = OPENERS[request["reader"]](Path(request["of"]), request["workers"], request["batch"])
    documents = tokens = 0
    started = time.perf_counter()
    for _, weights in loader:
        documents += len(weights)
        tokens += int(np.asarray(weights).sum())
    seconds = time.perf_counter() - started
    return {"documents": documents, "tokens": tokens, "seconds": seconds}


def main() -> None:
    # Libraries that write to standard output must not spoil the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"write": write, "epoch": epoch}[request["do"]](request)
        except Exception as error:  # noqa: BLE001 - told to whoever asked
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
