"""Where generations lie, as people say it: a directory or s3://…, of a training, a job or one save.

Needs no torch. Knows no ranks and changes nothing.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from paceline.errors import InvalidInput, SourceMissing
from paceline.objects import DiskStore, ObjectStore, join_url
from paceline.profile import Profile, object_access
from paceline.training.checkpoint.generations import Generation, Generations
from paceline.wire.training import TrainJob


def store_for(place: str, profile: Profile | None = None) -> ObjectStore:
    """Return the disk, or for ``s3://…`` the server that ``profile`` and the environment name.

    Raises AccessDenied where there are no credentials.
    """
    if not place.startswith("s3://"):
        return DiskStore()
    return ObjectStore.from_access(object_access(profile or Profile()))


def generations_at(
    place: Path | str, store: ObjectStore | None = None, profile: Profile | None = None
) -> Generations:
    """Return the generations of the job at ``place``: its directory or URL, that of one of its
    generations, or the output directory of a training on this machine (also of one that keeps its
    checkpoints elsewhere).

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
    """Return the generation that ``place`` is, else that of ``step``, else the newest committed.

    Nothing of it was verified yet. Raises SourceMissing where there is none.
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
    """Return the URL of the job that ``place`` is or, as a training's output, tells of."""
    if not place.is_dir():
        raise SourceMissing("no such directory", got=place, wanted="checkpoints of a training")
    if not (place / "checkpoints").is_dir():
        return _kept_at(place) or DiskStore.url_of(place)
    found = {
        each: where
        for each in sorted((place / "checkpoints").iterdir())
        if each.is_dir() and (where := _kept_at(each)) is not None
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


def _kept_at(record: Path) -> str | None:
    """Return where the generations lie of the job whose directory this is; None without any.

    A training that keeps them elsewhere has its job there alone.
    """
    if any(Generation.named(each.name) for each in record.iterdir()):
        return DiskStore.url_of(record)
    try:
        job = TrainJob.model_validate_json((record / "job.json").read_bytes())
    except (OSError, ValidationError):
        return None
    where = join_url(job.checkpoint_url, job.job_id)
    return None if where == DiskStore.url_of(record) else where
