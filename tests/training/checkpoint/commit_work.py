"""Everything that saving does to a store, in a process that may be killed anywhere: ``ROOT``.

Each generation holds two files that say its step; an old one is collected, one that rots is
rejected. Run again it goes on after the newest healthy one, as training does. Needs no torch.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from paceline.errors import CorruptData
from paceline.storage import DiskStore
from paceline.training.checkpoint import (
    Commit,
    Generation,
    Generations,
    Index,
    SavedFile,
    StoredChunk,
    StoredTensor,
)

LAST, KEEP = 5, 2
FILES = ("rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors")


def content(step: int, file: str) -> bytes:
    return f"step {step} of {file}\n".encode() * 200


def newest_healthy(generations: Generations, scratch: Path) -> int:
    """Return the step to go on after, rejecting what is damaged."""
    while found := generations.find().committed:
        try:
            return generations.verify(found[0], scratch).step
        except CorruptData as error:
            generations.reject(found[0], error.one_line())
    return 0


def save(generations: Generations, step: int, source: Path) -> None:
    generation = Generation(step, int.from_bytes(hashlib.sha256(str(step).encode()).digest()[:4]))
    if generation in generations.find().rejected:
        generation = Generation(step, generation.number ^ 1)  # a save has a number of its own
    files = {}
    for file in FILES:
        (source / file).write_bytes(content(step, file))
        data = content(step, file)
        files[file] = SavedFile(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
        generations.put_file(generation, file, source / file, files[file])
    chunks = tuple(
        StoredChunk(file=file, offsets=(at,), sizes=(1,)) for at, file in enumerate(FILES)
    )
    commit = Commit(
        job_id="job",
        step=step,
        position={"batch": step},
        config_digest="c" * 64,
        code_version="test",
        world_size=2,
        layout={},
        metrics={},
        environment={},
        extra={},
        files=files,
    )
    index = Index(tensors={"model.w": StoredTensor(dtype="F32", shape=(2,), chunks=chunks)})
    generations.commit(generation, commit, index)
    generations.collect(KEEP, 0, generation)


def work(root: Path, last: int = LAST) -> None:
    """Save what is missing, up to ``last``; the third generation rots once."""
    generations = Generations(DiskStore(), DiskStore.url_of(root / "job"))
    source = root / "source"
    source.mkdir(parents=True, exist_ok=True)
    step = newest_healthy(generations, source)
    while step < last:
        step += 1
        save(generations, step, source)
        if step == 3 and not (root / "rotted").exists():
            (root / "rotted").write_text("")
            newest = generations.find().committed[0]
            victim = DiskStore.path_of(generations.url_of(newest)) / FILES[1]
            with victim.open("r+b") as file:
                file.write(b"S")
            step = newest_healthy(generations, source)


if __name__ == "__main__":
    work(Path(sys.argv[1]))
