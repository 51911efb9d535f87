"""Differences between now and a recorded training: code, libraries, processor, data, base model.

``current_environment`` returns the environment; the same environment and job give the same bits.
``differences_of`` lists every difference, ``require_same`` raises where one makes a bitwise
comparison meaningless. Imports neither torch nor numpy (the driver calls it) nor MLflow (the caller
passes the record).
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import paceline
from paceline.config import Runtime
from paceline.data import Snapshot, load_snapshot, root_url, store_at
from paceline.errors import NotReproducible, PermanentError
from paceline.manifest import MANIFEST_FILE, directory_name, parse_manifest
from paceline.schemas import Difference, TrainJob, TrainResult, digest_of
from paceline.storage import ObjectStore, join_url
from paceline.system import processor
from paceline.training.identity import code_version, config_digest, task_size_of
from paceline.training.parallel import is_asynchronous

GIT_S = 20.0  # timeout of one git command
# Instruction sets that select different kernels and therefore different rounding.
_KERNELS = [
    "avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "sve", "neon"
]  # fmt: skip
_NVIDIA = Path("/proc/driver/nvidia/gpus")
# One fixed workspace per stream makes cuBLAS sum in the same order each time. Ranks set it for
# deterministic jobs, so it does not count as a difference between two environments.
CUBLAS_DETERMINISTIC = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Those that change arithmetic; the launcher sets the numbers of threads, ``threads`` records them.
_VARIABLES = (
    CUBLAS_DETERMINISTIC[0], "CUDA_VISIBLE_DEVICES", "ATEN_CPU_CAPABILITY", "MKL_CBWR",
    "ONEDNN_MAX_CPU_ISA",
)  # fmt: skip
# Fields whose difference may change bits; differences in other fields are only reported.
DECISIVE = (
    "python", "torch", "numpy", "machine", "accelerator", "kernels", "sources", "threads",
    "packages", "variables",
)  # fmt: skip


def current_environment(threads: int = 1) -> dict[str, Any]:
    """Return everything besides the job that affects the bits of a training in this process.

    ``threads``: of each rank; ``sources``: ``code_version()``; ``variables``: environment variables
    that change arithmetic.
    """
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    if variables.get(CUBLAS_DETERMINISTIC[0]) == CUBLAS_DETERMINISTIC[1]:
        del variables[CUBLAS_DETERMINISTIC[0]]
    return _fixed() | {"threads": threads, "variables": variables, "sources": code_version()}


@functools.cache
def _fixed() -> dict[str, Any]:
    root = Path(str(paceline.__file__)).resolve().parents[2]
    locks = [root / "requirements" / name for name in ("base.lock", "train.lock")]
    commit, diff = _commit(root)
    model, flags = processor()
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "torch": _version("torch"),
        "numpy": _version("numpy"),
        "machine": platform.machine(),  # architecture
        "system": f"{platform.system()} {platform.release()}",
        "processor": model,
        "cores": os.cpu_count() or 1,
        "accelerator": _accelerator(),
        "kernels": [each for each in _KERNELS if each in flags],
        "packages": _packages(),
        # of base and train; "": no such files (an installed wheel)
        "lock": hashlib.sha256(b"".join(each.read_bytes() for each in locks)).hexdigest()
        if all(each.is_file() for each in locks)
        else "",
        "commit": commit,
        "diff": diff,
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _packages() -> str:
    found = {
        f"{each.metadata['Name']}=={each.version}".lower()
        for each in metadata.distributions()
        if each.metadata["Name"] and each.metadata["Name"].lower() != "paceline"
    }
    return digest_of(sorted(found))


def _accelerator() -> str:
    """Return the driver's name of the first GPU (importing torch for it takes seconds)."""
    for each in sorted(_NVIDIA.glob("*/information")):
        for line in each.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                return value.strip()
    return ""


def _commit(root: Path) -> tuple[str, str]:
    """Return the commit and a digest of the uncommitted changes to the sources; "": none."""
    if not (root / ".git").exists():
        return "", ""
    try:
        commit = _git(root, "rev-parse", "HEAD").decode().strip()
        diff = _git(root, "diff", "HEAD", "--", "src", "flows", "tasks")
    except (OSError, subprocess.SubprocessError):  # no git: the digest of the sources suffices
        return "", ""
    return commit, hashlib.sha256(diff).hexdigest() if diff else ""


def _git(root: Path, *words: str) -> bytes:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, timeout=GIT_S, check=True).stdout


SNAPSHOT, BASE = "data snapshot", "base model"
REQUIRED_INPUTS = (SNAPSHOT, BASE)  # missing inputs: training is impossible without them
COMPARE_ANYWAY_HINT = "or compare all the same with --anyway."


@dataclass(frozen=True)
class Recorded:
    """A training as recorded by its run."""

    run_id: str
    job: TrainJob
    result: TrainResult
    losses: Mapping[int, float]  # by step


def differences_of(recorded: Recorded, runtime: Runtime, store: ObjectStore) -> list[Difference]:
    """Return all differences between now and ``recorded``.

    Raises TemporaryError where the store is not reachable.
    """
    return [
        *_of_data(recorded.job, store),
        *_of_base(recorded.job, runtime),
        *_of_code(recorded),
        *_of_task(recorded, runtime),
        *_of_environment(recorded),
        *_of_run_events(recorded),
    ]


def require_same(found: Sequence[Difference], *, anyway: bool = False) -> None:
    """Raise NotReproducible for the first decisive difference in ``found``.

    With ``anyway`` only missing or damaged data or base model count.
    """
    against = [
        each for each in found if each.decisive and (not anyway or each.what in REQUIRED_INPUTS)
    ]
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


def nodes_with_base_model(job: TrainJob, runtime: Runtime) -> list[str]:
    """Return the nodes on this machine's disk that hold the job's base model unchanged."""
    held = []
    for node in sorted((runtime.state_dir / "nodes").glob("*")):
        path = node / "store/models" / directory_name(job.model_id) / job.version / MANIFEST_FILE
        try:
            manifest = parse_manifest(path.read_bytes())
        except (OSError, PermanentError):
            continue  # no base model there, or a damaged one
        if manifest.digest == job.manifest_digest:
            held.append(node.name)
    return held


def _of_data(job: TrainJob, store: ObjectStore) -> Iterator[Difference]:
    if now := _data_now(job, store):
        yield _decisive(
            SNAPSHOT,
            job.snapshot_digest,
            now,
            "Bring it back, or make it again with `paceline snapshot`: the same texts and "
            "settings give the same digest.",
            job.snapshot_url,
        )


def _data_now(job: TrainJob, store: ObjectStore) -> str:
    """Return what differs about the snapshot; "" for nothing."""
    try:
        snapshot = load_snapshot(job.snapshot_url, store)
    except PermanentError as error:
        return error.one_line()
    if snapshot.digest != job.snapshot_digest:
        return snapshot.digest
    # One listing only: every rank verifies the bytes of the shards that it reads.
    shards = join_url(root_url(snapshot.url), "shards")
    listed = {
        each.url.rsplit("/", 1)[-1]: each.size for each in store_at(shards, store).list(shards)
    }
    bad = _bad_shards(snapshot, listed)
    return f"{len(bad)} of its files missing or cut: {', '.join(bad[:3])}" if bad else ""


def _bad_shards(snapshot: Snapshot, listed: Mapping[str, int]) -> list[str]:
    bad = []
    for shard in snapshot.shards:
        if listed.get(shard.name) != shard.bytes:
            bad.append(shard.name)
        if shard.lengths_name not in listed:
            bad.append(shard.lengths_name)
    return bad


def _of_base(job: TrainJob, runtime: Runtime) -> Iterator[Difference]:
    if job.settings.code_ref or nodes_with_base_model(job, runtime):
        return
    again = "The `paceline train` that made it, given again, puts it there and trains nothing."
    if runtime.endpoints.coordinator_url:
        again = f"Distribute it first: `paceline distribute {job.model_id} {job.version}`."
    yield _decisive(
        BASE,
        f"{job.model_id} {job.version} {job.manifest_digest[:16]}",
        "on no node of this machine",
        again,
        str(runtime.state_dir / "nodes"),
    )


def _of_code(recorded: Recorded) -> Iterator[Difference]:
    result, now = recorded.result, code_version()
    if result.code_version != now:
        commit = str(result.environment.get("commit") or "")
        changed = " (it had changes of its own then)" if result.environment.get("diff") else ""
        back = f"Check out commit {commit[:12]}{changed}" if commit else "Install that release"
        yield _decisive(
            "code version",
            result.code_version or "nothing recorded",
            now,
            f"{back}, {COMPARE_ANYWAY_HINT}",
            str(Path(paceline.__file__).parent),
        )
    if result.config_digest != (digest := config_digest(recorded.job)):
        yield _decisive(
            "configuration digest",
            result.config_digest,
            digest,
            f"Look at its settings: the code counts others among them now, {COMPARE_ANYWAY_HINT}",
            f"the record of {recorded.run_id}",
        )


def _of_task(recorded: Recorded, runtime: Runtime) -> Iterator[Difference]:
    """Yield a difference where a job with a codeRef did not record its model size.

    Such a job is built for the current profile's size; one with a recorded size uses that.
    """
    job = recorded.job
    if not job.settings.code_ref or job.task is not None:
        return
    size = task_size_of(job, runtime.profile)
    yield _decisive(
        "model settings",
        "not recorded",
        f"{size.parameters} parameters, rows of {size.context}",
        f"Set model.parameters and model.context as they were, {COMPARE_ANYWAY_HINT}",
        "model in the profile",
    )


def _of_environment(recorded: Recorded) -> Iterator[Difference]:
    then: dict[str, Any] = dict(recorded.result.environment)
    if not then:
        return
    settings = recorded.job.settings
    now = current_environment(settings.threads_per_rank)
    if recorded.result.code_version != now["sources"]:  # already reported as the code version
        then.pop("sources", None)
        now.pop("sources")
    if not (settings.code_ref or settings.optimizer_ref or recorded.job.data.transform):
        # Only user code may import packages other than torch and numpy.
        then.pop("packages", None)
        now.pop("packages")
    for name in [*then, *(each for each in now if each not in then)]:
        before, after = then.get(name, "nothing"), now.get(name, "nothing")
        if before != after:
            yield Difference(
                what=name,
                then=str(before),
                now=str(after),
                decisive=name in DECISIVE,
                where=platform.node(),
                do=f"Bring back {name} {before} here or run it where that is, "
                f"{COMPARE_ANYWAY_HINT}",
            )


def _of_run_events(recorded: Recorded) -> Iterator[Difference]:
    """Yield events of the recorded run that a second run does not repeat."""
    job, result = recorded.job, recorded.result
    if is_asynchronous(job.settings):
        yield _decisive(
            "synchrony",
            "updates were taken as they came",
            "as they come",
            f"No such run repeats itself; {COMPARE_ANYWAY_HINT}",
        )
    if not job.deterministic or result.deterministic is False:
        how = "Its bits were not fixed (training.deterministic=true does that)"
        yield _decisive("deterministic mode", "off", "on", f"{how}; {COMPARE_ANYWAY_HINT}")
    ranks = job.settings.ranks
    if sizes := sorted({each.ranks for each in result.restarts} - {0, ranks}):
        was = f"{', '.join(map(str, sizes))} for a time, {ranks} at first"
        yield _decisive("ranks", was, str(ranks), f"Sums round elsewhere; {COMPARE_ANYWAY_HINT}")
    if result.resumed_from_step:
        then = f"{result.resumed_from_step} made earlier, perhaps on other ranks or another mesh"
        now = f"made like the others: {ranks} ranks"
        yield Difference(what="steps before", then=then, now=now, decisive=False)
    if passed := list(result.skipped_batches or job.skip_batches):
        then, now = f"{passed}, once they had gone wrong", f"{passed}, from the beginning"
        yield Difference(what="batches passed over", then=then, now=now, decisive=False)
    if result.quarantined_shards:
        then = ", ".join(each[:12] for each in result.quarantined_shards)
        now = "known once it is read"
        yield Difference(what="data in quarantine", then=then, now=now, decisive=False)


def _decisive(what: str, then: str, now: str, do: str, where: str = "") -> Difference:
    return Difference(what=what, then=then, now=now, decisive=True, where=where, do=do)
