"""Where generations lie, as people say it: a directory or s3://…, of a training, a job or one save.

Needs no torch. Knows no ranks and changes nothing.
"""

from __future__ import annotations

from pathlib import Path

from paceline.errors import InvalidInput, SourceMissing
from paceline.objects import DiskStore, ObjectStore
from paceline.profile import Profile, object_access
from paceline.training.checkpoint.generations import Generation, Generations


def store_for(place: str, profile: Profile | None = None) -> ObjectStore:
    """Return the disk, or for ``s3://…`` the server that ``profile`` and the environment name.

    Raises AccessDenied where there are no credentials.
    """
    if not place.startswith("s3://"):
        return DiskStore()
    return ObjectStore.from_access(object_access(profile or Profile()))


def generations_at(place: Path | str, store: ObjectStore | None = None) -> Generations:
    """Return the generations of the job at ``place``: its directory or URL, that of one of its
    generations, or the output directory of a training on this machine.

    Raises SourceMissing where there is none, InvalidInput where there are several jobs.
    """
    text = str(place)
    if "://" not in text:
        text = DiskStore.url_of(_job_below(Path(text)))
    store = store or store_for(text)
    above, _, last = text.rstrip("/").rpartition("/")
    return Generations(store, above if Generation.named(last) else text.rstrip("/"))


def generation_at(
    place: Path | str, step: int | None = None, store: ObjectStore | None = None
) -> tuple[Generations, Generation]:
    """Return the generation that ``place`` is, else that of ``step``, else the newest committed.

    Nothing of it was verified yet. Raises SourceMissing where there is none.
    """
    generations = generations_at(place, store)
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


def _job_below(place: Path) -> Path:
    """Return the job's directory that ``place`` is or, as a training's output, holds."""
    if not place.is_dir():
        raise SourceMissing("no such directory", got=place, wanted="checkpoints of a training")
    if not (place / "checkpoints").is_dir():
        return place
    jobs = sorted(
        each
        for each in (place / "checkpoints").iterdir()
        if each.is_dir() and any(Generation.named(one.name) for one in each.iterdir())
    )
    if not jobs:
        raise SourceMissing("no checkpoints here", got="none", where=place / "checkpoints")
    if len(jobs) > 1:
        raise InvalidInput(
            "several trainings here",
            got=", ".join(each.name for each in jobs),
            wanted="one of them",
            where=place / "checkpoints",
            do=f"Name one: {jobs[0]}",
        )
    return jobs[0]
