"""`paceline checkpoints`: list and verify generations, and export them to DCP.

PLACE is a directory or s3:// URL: the --output or --checkpoints of `paceline train`, the directory
of one of its jobs, or that of a single checkpoint. S3's endpoint and credentials are those of the
installation for its own bucket, else come from the profile ([objects]) or the environment.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.commands import Group
from paceline.cli.options import json_option, objects_of, profile_options, read_profile, show
from paceline.errors import CorruptData, SourceMissing
from paceline.schemas import CheckpointExported, CheckpointShown, CheckpointsShown

if TYPE_CHECKING:
    from paceline.storage import ObjectStore
    from paceline.training.checkpoint import Generation, Generations

directory_type = click.Path(path_type=Path, file_okay=False)
step_option = click.option(
    "--step", type=click.IntRange(min=0), default=None, help="Default: the newest."
)


@click.group(cls=Group)
def checkpoints() -> None:
    """List a training's checkpoints, verify them, and export them to torch's own format."""


@checkpoints.command("list")
@click.argument("place")
@click.option("--verify", is_flag=True, help="Read and check every byte of each.")
@profile_options
@json_option
def list_checkpoints(
    place: str, verify: bool, profile: str, overrides: tuple[str, ...], as_json: bool
) -> int:
    """List the checkpoints at PLACE, newest first. With --verify, exit code 1 where one is damaged;
    it is named, and left as it is.
    """
    settings, store = read_profile(profile, overrides), _store(place, profile, overrides)
    from paceline.training.checkpoint import generations_at  # torch, which takes seconds

    generations = generations_at(place, store, settings)
    found = generations.find()
    shown: list[CheckpointShown] = []
    job_id: str | None = None
    for each in found.committed:
        one, its_job = _look(generations, each, verify)
        shown.append(one)
        job_id = job_id or its_job
    shown += [
        _shown(generations, each, "rejected", generations.why_rejected(each))
        for each in found.rejected
    ]
    shown += [_shown(generations, each, "unfinished") for each in found.unfinished]
    shown.sort(key=lambda each: each.name, reverse=True)
    answer = CheckpointsShown(url=generations.url, job_id=job_id, checkpoints=tuple(shown))
    lines = [f"{job_id or 'checkpoints'} at {generations.url}: {len(shown) or 'none'}"]
    for one in shown:
        size = "" if one.bytes is None else f"{one.bytes:>15,} bytes"
        lines.append(f"  step {one.step:>8}  {one.status:<10} {size}  {one.name}")
        lines += [f"                 {one.why}"] if one.why else []
    show(answer, as_json, *lines)
    return 1 if any(each.status == "damaged" for each in shown) else 0


@checkpoints.command("export")
@click.argument("place")
@click.argument("directory", type=directory_type)
@step_option
@click.option("--weights-only", is_flag=True, help="Leave the optimizer out.")
@click.option(
    "--model-prefix",
    default="model",
    show_default=True,
    help="What stands before the names of weights; '' for torchtitan.",
)
@profile_options
@json_option
def export_checkpoint(
    place: str,
    directory: Path,
    step: int | None,
    weights_only: bool,
    model_prefix: str,
    profile: str,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int:
    """Write a checkpoint at PLACE into the new DIRECTORY as torch.distributed.checkpoint has them.

    \b
      dcp.load({"model": model.state_dict()}, checkpoint_id=DIRECTORY)

    Every byte is verified on the way.
    """
    began = time.monotonic()
    settings, store = read_profile(profile, overrides), _store(place, profile, overrides)
    from paceline.training.checkpoint import export_dcp, generation_at  # torch, which takes seconds

    generations, generation = generation_at(place, step, store, settings)
    commit, tensors = export_dcp(
        generations,
        generation,
        directory,
        model_prefix=model_prefix,
        weights_only=weights_only,
        config=_config_of(place, generations),
    )
    done = CheckpointExported(
        url=generations.url_of(generation),
        step=commit.step,
        directory=str(directory.absolute()),
        bytes=sum(each.stat().st_size for each in directory.iterdir()),
        tensors=tensors,
        seconds=time.monotonic() - began,
    )
    show(
        done,
        as_json,
        f"step {done.step} of {commit.job_id} at {done.directory}: {done.tensors} tensors, "
        f"{done.bytes:,} bytes, in {done.seconds:.1f} s",
    )
    return 0


def _store(place: str, profile: str, overrides: tuple[str, ...]) -> ObjectStore | None:
    """Return the store of the installation that a command means, where ``place`` is its bucket.

    Raises SourceMissing where ``place`` is a path and nothing is there.
    """
    if not place.startswith("s3://"):
        if "://" not in place and not Path(place).exists():
            raise SourceMissing(
                "no such directory",
                got=place,
                wanted="the --output of a training, its checkpoints, or s3://bucket/prefix",
            )
        return None
    from paceline.storage import parse_url

    settings, store = objects_of(None, profile, overrides)
    return store if parse_url(place)[0] == settings.storage.bucket else None


def _look(
    generations: Generations, generation: Generation, verify: bool
) -> tuple[CheckpointShown, str | None]:
    """Return a committed generation as shown to the user, and the id of its job."""
    try:
        if verify:
            with tempfile.TemporaryDirectory(prefix="paceline-verify-") as scratch:
                commit = generations.verify(generation, Path(scratch))
        else:
            commit = generations.commit_of(generation)
    except CorruptData as error:
        return _shown(generations, generation, "damaged", error.one_line()), None
    shown = CheckpointShown(
        name=str(generation),
        step=generation.step,
        status="verified" if verify else "committed",
        url=generations.url_of(generation),
        bytes=commit.bytes,
        world_size=commit.world_size,
        held_out_loss=commit.metrics.get("held_out_loss"),
    )
    return shown, commit.job_id


def _shown(
    generations: Generations, generation: Generation, status: str, why: str = ""
) -> CheckpointShown:
    return CheckpointShown.model_validate(
        {
            "name": str(generation),
            "step": generation.step,
            "status": status,
            "url": generations.url_of(generation),
            "why": why,
        }
    )


def _config_of(place: str, generations: Generations) -> bytes:
    """Return the model's config.json, or b"" where there is none.

    It is in a finished job's export, and in the output directory of a training on this machine.
    """
    from paceline.storage import join_url

    if "://" not in place:
        base = "state/nodes/local/store/models/model/v1/config.json"
        here = Path(place).absolute()
        for each in (here, *here.parents[:3]):
            if (each / base).is_file():
                return (each / base).read_bytes()
    for name in generations.store.directories(generations.url):
        if name.startswith("export"):  # of files of another size: with the same config
            with contextlib.suppress(SourceMissing):
                return generations.store.get_bytes(join_url(generations.url, name, "config.json"))
    return b""
