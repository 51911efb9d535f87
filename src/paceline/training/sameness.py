"""What is not as it was when a run trained: code, libraries, processor, data, base model.

``differences_of`` lists it, ``require_same`` refuses to train where the bits would not say
anything. Trains nothing, and knows no MLflow: what was recorded is handed in.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline
from paceline.data import load_snapshot
from paceline.data.snapshot import Snapshot, root_url, store_at
from paceline.errors import NotReproducible, PermanentError
from paceline.manifest import MANIFEST_FILE, parse_manifest
from paceline.objects import ObjectStore, join_url
from paceline.profile import Runtime
from paceline.training.environment import current, differences
from paceline.training.identity import code_version, config_digest, size_of
from paceline.training.relaxed import is_asynchronous
from paceline.wire.reproducing import Differs
from paceline.wire.training import TrainJob, TrainResult

SNAPSHOT, BASE, CODE, CONFIGURATION, TASK = (
    "data snapshot", "base model", "code version", "configuration digest", "model settings",
)  # fmt: skip
GONE = (SNAPSHOT, BASE)  # without them there is nothing to train
COMPARE = "or compare all the same with --anyway."


@dataclass(frozen=True)
class Recorded:
    """A training as its run recorded it."""

    run_id: str
    job: TrainJob
    result: TrainResult
    losses: Mapping[int, float]  # by step


def differences_of(recorded: Recorded, runtime: Runtime, store: ObjectStore) -> list[Differs]:
    """Return everything that is not as it was when ``recorded`` was made.

    Raises TemporaryError where the store cannot say now.
    """
    return [
        *_of_data(recorded.job, store),
        *_of_base(recorded.job, runtime),
        *_of_code(recorded),
        *_of_task(recorded, runtime),
        *_of_environment(recorded),
        *_of_course(recorded),
    ]


def require_same(found: Sequence[Differs], *, anyway: bool = False) -> None:
    """Raise NotReproducible for the first of ``found`` that speaks against training again.

    With ``anyway`` only data or a base model that are not there do.
    """
    against = [each for each in found if each.decisive and (not anyway or each.what in GONE)]
    if not against:
        return
    first, others = against[0], [each.what for each in against[1:]]
    more = f" (differs too: {', '.join(others)})" if others else ""
    raise NotReproducible(
        f"{first.what} is not as it was when the run trained",
        got=f"{first.now}{more}",
        wanted=first.then,
        where=first.where or None,
        do=first.do or None,
    )


def holders_of(job: TrainJob, runtime: Runtime) -> list[str]:
    """Return the nodes on this machine's disk that hold the job's base model, as it was."""
    held = []
    for node in sorted((runtime.state_dir / "nodes").glob("*")):
        path = node / "store" / "models" / job.model_id / job.version / MANIFEST_FILE
        try:
            manifest = parse_manifest(path.read_bytes())
        except (OSError, PermanentError):
            continue  # it holds none, or a damaged one: no place to start from
        if manifest.digest == job.manifest_digest:
            held.append(node.name)
    return held


def _of_data(job: TrainJob, store: ObjectStore) -> Iterator[Differs]:
    def differs(now: str, where: str) -> Differs:
        return Differs(
            what=SNAPSHOT,
            then=job.snapshot_digest,
            now=now,
            decisive=True,
            where=where,
            do="Bring it back, or make it again with `paceline snapshot`: the same texts and "
            "settings give the same digest.",
        )

    try:
        snapshot = load_snapshot(job.snapshot_url, store)
    except PermanentError as error:
        yield differs(error.one_line(), job.snapshot_url)
        return
    if snapshot.digest != job.snapshot_digest:
        yield differs(snapshot.digest, job.snapshot_url)
        return
    # Their bytes are checked by every rank that reads them; a listing is all this costs.
    shards = join_url(root_url(snapshot.url), "shards")
    listed = {
        each.url.rsplit("/", 1)[-1]: each.size for each in store_at(shards, store).list(shards)
    }
    if bad := _bad_shards(snapshot, listed):
        yield differs(f"{len(bad)} of its files missing or cut: {', '.join(bad[:3])}", shards)


def _bad_shards(snapshot: Snapshot, listed: Mapping[str, int]) -> list[str]:
    bad = []
    for shard in snapshot.shards:
        if listed.get(shard.name) != shard.bytes:
            bad.append(shard.name)
        if shard.lengths_sha256 is not None and shard.lengths_name not in listed:
            bad.append(shard.lengths_name)
    return bad


def _of_base(job: TrainJob, runtime: Runtime) -> Iterator[Differs]:
    if job.settings.code_ref or holders_of(job, runtime):
        return
    yield Differs(
        what=BASE,
        then=f"{job.model_id} {job.version} {job.manifest_digest[:16]}",
        now="on no node of this machine",
        decisive=True,
        where=str(runtime.state_dir / "nodes"),
        do=f"Distribute it first: `paceline distribute {job.model_id} {job.version}`."
        if runtime.endpoints.coordinator_url
        else "The `paceline train` that made it, given again, puts it there and trains nothing.",
    )


def _of_code(recorded: Recorded) -> Iterator[Differs]:
    result, now = recorded.result, code_version()
    where = str(Path(paceline.__file__).parent)
    if result.code_version != now:
        commit = str(result.environment.get("commit") or "")
        changed = " (it had changes of its own then)" if result.environment.get("diff") else ""
        back = f"Check out commit {commit[:12]}{changed}" if commit else "Install that release"
        yield Differs(
            what=CODE,
            then=result.code_version or "nothing recorded",
            now=now,
            decisive=True,
            where=where,
            do=f"{back}, {COMPARE}",
        )
    if result.config_digest != (digest := config_digest(recorded.job)):
        yield Differs(
            what=CONFIGURATION,
            then=result.config_digest,
            now=digest,
            decisive=True,
            where=f"the record of {recorded.run_id}",
            do=f"Look at its settings: the code counts others among them now, {COMPARE}",
        )


def _of_task(recorded: Recorded, runtime: Runtime) -> Iterator[Differs]:
    """Yield what a job with a codeRef was built for, where it was not recorded: then it is built
    for what the profile says now. One that recorded it is built for that, whatever the profile.
    """
    job = recorded.job
    if not job.settings.code_ref or job.task is not None:
        return
    size = size_of(job, runtime.profile)
    yield Differs(
        what=TASK,
        then="not recorded",
        now=f"{size.parameters} parameters, rows of {size.context}",
        decisive=True,
        where="model in the profile",
        do=f"Set model.parameters and model.context as they were, {COMPARE}",
    )


def _of_environment(recorded: Recorded) -> Iterator[Differs]:
    then: dict[str, Any] = dict(recorded.result.environment)
    if not then:
        return
    settings = recorded.job.settings
    now = current(settings.threads_per_rank).model_dump(mode="json")
    if recorded.result.code_version != now["sources"]:  # said before, as the code version
        then.pop("sources", None)
        now.pop("sources")
    if not (settings.code_ref or recorded.job.data.transform):
        # Only code that is not ours may import what is neither torch nor numpy.
        then.pop("packages", None)
        now.pop("packages")
    for each in differences(then, now):
        yield each.model_copy(
            update={
                "where": platform.node(),
                "do": f"Bring back {each.what} {each.then} here or run it where that is, {COMPARE}",
            }
        )


def _of_course(recorded: Recorded) -> Iterator[Differs]:
    """Yield what happened on the way and does not happen again."""
    job, result = recorded.job, recorded.result
    if is_asynchronous(job.settings):
        chance = "updates were taken as they came"
        yield _told("synchrony", chance, "as they come", f"No such run repeats itself; {COMPARE}")
    if not job.deterministic:
        yield _told("deterministic mode", "off", "on", f"Its bits were not fixed; {COMPARE}")
    if sizes := sorted({each.ranks for each in result.restarts} - {0, job.settings.ranks}):
        was = f"{', '.join(map(str, sizes))} for a time, {job.settings.ranks} at first"
        yield _told("ranks", was, str(job.settings.ranks), f"Sums round elsewhere; {COMPARE}")
    if result.resumed_from_step:
        yield Differs(
            what="steps before",
            then=f"{result.resumed_from_step} made earlier, perhaps on other ranks or another mesh",
            now=f"made like the others: {job.settings.ranks} ranks",
            decisive=False,
        )
    if passed := result.skipped_batches or job.skip_batches:
        yield Differs(
            what="batches passed over",
            then=f"{list(passed)}, once they had gone wrong",
            now=f"{list(passed)}, from the beginning",
            decisive=False,
        )
    if result.quarantined_shards:
        yield Differs(
            what="data in quarantine",
            then=", ".join(each[:12] for each in result.quarantined_shards),
            now="known once it is read",
            decisive=False,
        )


def _told(what: str, then: str, now: str, do: str) -> Differs:
    return Differs(what=what, then=then, now=now, decisive=True, do=do)
