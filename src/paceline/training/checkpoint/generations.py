"""The checkpoint generations of one job in a store: list, read, commit, reject, delete.

A generation is ``<job>/step-NNNNNNNN-XXXXXXXX/`` (the step, and a random number per save, so that
no save overwrites another): files of tensors, ``index.json``, and, written last, ``commit.json``,
which names every file with its SHA-256 and contains its own digest. A generation exists only if its
marker matches its own digest and every byte it names (I8).

Does not need torch, so a supervisor can list generations. Does not depend on ranks: rank 0 commits,
rejects and collects.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from paceline.config import Profile, object_access
from paceline.errors import CorruptData, InvalidInput, SourceMissing, StorageFailed, TrainingFailed
from paceline.schemas import TrainJob, canonical_json
from paceline.storage import DiskStore, ObjectStore, join_url
from paceline.training.checkpoint.records import (
    BEST_METRIC,
    COMMIT_FILE,
    INDEX_FILE,
    MAX_COMMIT_BYTES,
    MAX_INDEX_BYTES,
    REJECTED_FILE,
    Commit,
    Index,
    Rejected,
    SavedFile,
)

log = logging.getLogger(__name__)

MAX_REJECTED = 2
LEFTOVER_AGE_S = 3600.0  # age at which unfinished uploads are aborted
_DIRECTORY = re.compile(r"step-(\d{8})-([0-9a-f]{8})")


class Generation(NamedTuple):
    """The name of one generation; later steps sort last."""

    step: int
    number: int  # random, one per save

    def __str__(self) -> str:
        return f"step-{self.step:08d}-{self.number:08x}"

    @classmethod
    def named(cls, name: str) -> Generation | None:
        """Return the generation with the directory ``name``; None for any other name."""
        match = _DIRECTORY.fullmatch(name)
        return cls(int(match[1]), int(match[2], 16)) if match else None


@dataclass(frozen=True)
class FoundGenerations:
    """The generations below a job's URL."""

    committed: tuple[Generation, ...]  # newest first; none of them verified
    rejected: tuple[Generation, ...]
    unfinished: tuple[Generation, ...]  # no marker: in progress, or left by a failed save


class Generations:
    """The checkpoints of one job; ``url`` is ``s3://bucket/prefix`` or ``file:///directory``."""

    def __init__(self, store: ObjectStore, url: str) -> None:
        self.store = store
        self.url = url
        self._swept = False
        self._losses: dict[Generation, float | None] = {}

    # ── listing ──────────────────────────────────────────────────────────────────────────────────

    def find(self) -> FoundGenerations:
        """Return all generations, each kind newest first."""
        files: dict[Generation, set[str]] = {}
        top = self.url.rstrip("/")
        for info in self.store.list(top):
            directory, _, name = info.url.removeprefix(f"{top}/").partition("/")
            if (generation := Generation.named(directory)) is not None:
                files.setdefault(generation, set()).add(name)
        found: tuple[list[Generation], ...] = ([], [], [])
        for each in sorted(files, reverse=True):
            kind = 0 if COMMIT_FILE in files[each] else 1 if REJECTED_FILE in files[each] else 2
            found[kind].append(each)
        return FoundGenerations(*map(tuple, found))

    def steps(self) -> list[int]:
        """Return the steps with a commit marker, newest first; none of them verified."""
        return list(dict.fromkeys(each.step for each in self.find().committed))

    def url_of(self, generation: Generation) -> str:
        return join_url(self.url, str(generation))

    # ── verified reads ───────────────────────────────────────────────────────────────────────────

    def commit_of(self, generation: Generation, config_digest: str = "") -> Commit:
        """Return the marker of ``generation``; raises CorruptData where its digest does not match.

        With ``config_digest``, raises TrainingFailed for a checkpoint of another configuration.
        """
        where = join_url(self.url_of(generation), COMMIT_FILE)
        try:
            raw = self.store.get_bytes(where, max_bytes=MAX_COMMIT_BYTES)
            commit = Commit.model_validate_json(raw)
            # ValueError: NaN and infinity have no canonical form
            matches = commit == commit.sealed() and raw == canonical_json(commit)
        except (InvalidInput, SourceMissing, StorageFailed, ValueError) as error:
            raise CorruptData("checkpoint has no readable commit marker", where=where) from error
        if not matches:
            raise CorruptData("commit marker does not match itself", where=where)
        if commit.step != generation.step or INDEX_FILE not in commit.files:
            raise CorruptData("commit marker is another step's", got=commit.step, where=where)
        if config_digest and commit.config_digest != config_digest:
            raise TrainingFailed(
                "checkpoint is of another configuration",
                got=f"configuration {commit.config_digest[:16]}",
                wanted=config_digest[:16],
                where=where,
                do="Use another job id, or the settings the job was started with.",
            )
        return commit

    def index_of(self, generation: Generation, commit: Commit) -> Index:
        """Return the index of tensors; raises CorruptData unless it matches the commit."""
        where = join_url(self.url_of(generation), INDEX_FILE)
        saved = commit.files[INDEX_FILE]
        try:
            raw = self.store.get_bytes(where, max_bytes=min(MAX_INDEX_BYTES, 2 * saved.bytes))
        except (SourceMissing, StorageFailed) as error:
            raise _damaged("is missing", "no such object", f"{saved.bytes} bytes", where) from error
        _require_same(saved, len(raw), hashlib.sha256(raw).hexdigest(), where)
        try:
            index = Index.model_validate_json(raw)
        except ValidationError as error:
            raise _damaged("is no index", str(error).splitlines()[0], "an index", where) from error
        named = {chunk.file for tensor in index.tensors.values() for chunk in tensor.chunks}
        if missing := sorted(named - set(commit.files)):
            raise CorruptData("checkpoint names no such file", got=missing[0], where=where)
        return index

    def fetch(self, generation: Generation, name: str, saved: SavedFile, directory: Path) -> Path:
        """Return a path of the file ``name``, every byte verified; raises CorruptData.

        A file in S3 is downloaded into ``directory``; a file on disk is read in place.
        """
        where = join_url(self.url_of(generation), name)
        on_disk = isinstance(self.store, DiskStore)
        path = DiskStore.path_of(where) if on_disk else directory / name
        try:
            size = self.store.head(where).size
            if size != saved.bytes:
                raise _damaged("has another size", size, saved.bytes, where)
            if not on_disk:
                self.store.download_file(where, path)
            with path.open("rb") as file:
                _require_same(saved, size, hashlib.file_digest(file, "sha256").hexdigest(), where)
        except SourceMissing as error:
            raise _damaged("is missing", "no such object", f"{saved.bytes} bytes", where) from error
        except OSError as error:
            raise CorruptData("checkpoint file cannot be read", got=error, where=where) from error
        return path

    def verify(self, generation: Generation, directory: Path) -> Commit:
        """Return the marker after verifying every byte of ``generation``; raises CorruptData."""
        commit = self.commit_of(generation)
        self.index_of(generation, commit)
        for name, saved in commit.files.items():
            if name != INDEX_FILE:
                self.fetch(generation, name, saved, directory)
        return commit

    # ── writing ──────────────────────────────────────────────────────────────────────────────────

    def put_file(self, generation: Generation, name: str, path: Path, saved: SavedFile) -> None:
        """Store the file at ``path`` as part of a generation that is not yet committed."""
        where = join_url(self.url_of(generation), name)
        info = self.store.upload_file(path, where, saved.sha256)
        if info.size != saved.bytes:
            raise CorruptData(
                "checkpoint file changed on its way",
                got=f"{info.size} bytes",
                wanted=f"{saved.bytes} bytes",
                where=where,
            )

    def commit(self, generation: Generation, commit: Commit, index: Index) -> Commit:
        """Write index and marker, and return the marker; all other files must be stored already.

        Raises CorruptData where one of them is missing.
        """
        where = self.url_of(generation)
        raw = canonical_json(index)
        self.store.put_bytes(join_url(where, INDEX_FILE), raw)
        saved = SavedFile(sha256=hashlib.sha256(raw).hexdigest(), bytes=len(raw))
        commit = commit.model_copy(update={"files": {**commit.files, INDEX_FILE: saved}}).sealed()
        there = {info.url.rpartition("/")[2]: info.size for info in self.store.list(where)}
        for name, each in commit.files.items():
            if there.get(name) != each.bytes:
                raise CorruptData(
                    "checkpoint file is not there", got=f"{name}: {there.get(name)}", where=where
                )
        self.store.put_bytes(join_url(where, COMMIT_FILE), canonical_json(commit))
        self._losses[generation] = commit.metrics.get(BEST_METRIC)
        return commit

    def reject(self, generation: Generation, why: str) -> None:
        """Withdraw a damaged generation: its marker moves into rejected.json with the reason."""
        where = self.url_of(generation)
        marker = join_url(where, COMMIT_FILE)
        try:
            raw = self.store.get_bytes(marker, max_bytes=MAX_COMMIT_BYTES)
        except (SourceMissing, StorageFailed):
            raw = b""
        record = Rejected(why=why, marker=raw.decode("utf-8", "replace"))
        self.store.put_bytes(join_url(where, REJECTED_FILE), canonical_json(record))
        self.store.delete(marker)
        log.warning("checkpoint rejected generation=%s why=%s", generation, why)

    def why_rejected(self, generation: Generation) -> str:
        """Return the reason that was given to ``reject``."""
        where = join_url(self.url_of(generation), REJECTED_FILE)
        raw = self.store.get_bytes(where, max_bytes=8 * MAX_COMMIT_BYTES)
        try:
            return Rejected.model_validate_json(raw).why
        except ValidationError:
            return f"{REJECTED_FILE} cannot be read"

    def remove(self, generation: Generation) -> None:
        """Delete a generation: the marker first, so that it is never a partial checkpoint."""
        where = self.url_of(generation)
        self.store.delete(join_url(where, COMMIT_FILE))
        self.store.delete_prefix(where)
        self._losses.pop(generation, None)

    def collect(self, newest: int, best: int, last: Generation) -> tuple[Generation, ...]:
        """Keep ``last`` (just committed), the ``newest`` and the ``best`` by held-out loss; return
        the kept generations, oldest first. Leftovers of failed saves before ``last`` are removed.
        """
        found = self.find()
        others = [each for each in found.committed if each.step != last.step]
        ours = sorted([last, *others], reverse=True)
        kept = {last, *ours[:newest], *self.best(ours, best)}
        for each in reversed(found.committed):
            if each not in kept:
                self.remove(each)
        for each in (*found.rejected[MAX_REJECTED:], *found.unfinished):
            if each.step <= last.step and each != last:
                self.remove(each)
        if not self._swept:
            self._swept = True
            self.store.abort_uploads(self.url, older_than_s=LEFTOVER_AGE_S)
        return tuple(sorted(kept))

    def best(
        self, committed: Iterable[Generation], count: int, at_most: float = math.inf
    ) -> list[Generation]:
        """Return the ``count`` generations of lowest held-out loss, of those whose loss is
        ``at_most`` so high.

        Of equal ones the oldest: later ones have the loss of the evaluation before them.
        """
        if not count:
            return []
        losses: dict[Generation, float] = {}
        for each in committed:
            if each not in self._losses:
                try:
                    self._losses[each] = self.commit_of(each).metrics.get(BEST_METRIC)
                except CorruptData:
                    self._losses[each] = None  # a resume rejects it, if it gets that far
            if (loss := self._losses[each]) is not None and loss <= at_most:
                losses[each] = loss
        return sorted(losses, key=lambda each: (losses[each], each))[:count]


def _require_same(saved: SavedFile, size: int, digest: str, where: str) -> None:
    if digest != saved.sha256 or size != saved.bytes:
        raise _damaged("does not match its hash", digest, saved.sha256, where)


def _damaged(how: str, got: object, wanted: object, where: str) -> CorruptData:
    return CorruptData(
        f"checkpoint file {how}",
        got=got,
        wanted=wanted,
        where=where,
        do="`paceline checkpoints list --verify` names the sound ones.",
    )


# Resolve a place that a user names (a directory or s3://…, of a training, a job or one save) to
# generations. Reads only.


def store_for(place: str, profile: Profile | None = None) -> ObjectStore:
    """Return a disk store, or for ``s3://…`` the server named by ``profile`` and environment.

    Raises AccessDenied where there are no credentials.
    """
    if not place.startswith("s3://"):
        return DiskStore()
    return ObjectStore(object_access(profile or Profile()))


def generations_at(
    place: Path | str, store: ObjectStore | None = None, profile: Profile | None = None
) -> Generations:
    """Return the generations of the job at ``place``: its directory or URL, that of one of its
    generations, or the output directory of a local training (also one that stores its checkpoints
    elsewhere).

    Raises SourceMissing where there is none, InvalidInput where there are several jobs.
    """
    text = str(place)
    if "://" not in text:
        text = _job_below(Path(text))
    store = store or store_for(text, profile)
    above, _, last = text.rstrip("/").rpartition("/")
    return Generations(store, above if Generation.named(last) else text.rstrip("/"))


def generation_at(
    place: Path | str,
    step: int | None = None,
    store: ObjectStore | None = None,
    profile: Profile | None = None,
) -> tuple[Generations, Generation]:
    """Return the generation at ``place``, else that of ``step``, else the newest committed.

    It is not verified. Raises SourceMissing where there is none.
    """
    generations = generations_at(place, store, profile)
    named = Generation.named(str(place).rstrip("/").rpartition("/")[2])
    committed = generations.find().committed
    if named is not None and (step is None or step == named.step):
        wanted, found = str(named), [each for each in committed if each == named]
    else:
        wanted = "a committed checkpoint" if step is None else f"a checkpoint of step {step}"
        found = [each for each in committed if step in (None, each.step)]
    if not found:
        raise SourceMissing(
            "no such checkpoint",
            got=f"steps {', '.join(str(each.step) for each in committed[:10]) or '(none)'}",
            wanted=wanted,
            where=generations.url,
            do="`paceline checkpoints list` shows what is there.",
        )
    return generations, found[0]


def _job_below(place: Path) -> str:
    """Return the URL of the job at ``place``: a job's directory, or a training's output."""
    if not place.is_dir():
        raise SourceMissing("no such directory", got=place, wanted="checkpoints of a training")
    if not (place / "checkpoints").is_dir():
        return _recorded_url(place) or DiskStore.url_of(place)
    found = {
        each: where
        for each in sorted((place / "checkpoints").iterdir())
        if each.is_dir() and (where := _recorded_url(each)) is not None
    }
    if not found:
        raise SourceMissing("no checkpoints here", got="none", where=place / "checkpoints")
    if len(found) > 1:
        raise InvalidInput(
            "several trainings here",
            got=", ".join(each.name for each in found),
            wanted="one of them",
            where=place / "checkpoints",
            do=f"Name one: {next(iter(found))}",
        )
    (where,) = found.values()
    return where


def _recorded_url(record: Path) -> str | None:
    """Return the URL of the generations of the job with this directory; None without any.

    Where a training stores them elsewhere, the directory holds only its ``job.json``.
    """
    if any(Generation.named(each.name) for each in record.iterdir()):
        return DiskStore.url_of(record)
    try:
        job = TrainJob.model_validate_json((record / "job.json").read_bytes())
    except (OSError, ValidationError):
        return None
    where = join_url(job.checkpoint_url, job.job_id)
    return None if where == DiskStore.url_of(record) else where
