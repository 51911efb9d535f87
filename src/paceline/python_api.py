"""What `import paceline` offers, one function a command: no server is needed but for ``Client``.

Settings are those of a profile, by their dotted keys: ``{"training.learning_rate": 3e-4}``; text
counts as on the command line. Sizes
and speeds are numbers (bytes, Mbit/s) or text with a unit ("500GB", "10Gbps"). Errors are those of
``paceline.errors``; each has ``what``, ``got``, ``wanted``, ``where`` and ``do``.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.client import Client, runtime_of
from paceline.config import (
    Profile,
    Runtime,
    find_installation,
    load_profile,
    object_access,
    with_overrides,
)
from paceline.errors import InvalidInput, NotReady, SourceMissing
from paceline.units import link_mbit, size_bytes

if TYPE_CHECKING:
    import pandas as pd

    from paceline.evaluation import TextModel
    from paceline.jobs import By
    from paceline.schemas import (
        Distribution,
        EvaluationReport,
        MeshEstimates,
        PlanTable,
        Published,
        RankEvent,
        SimulationReport,
        TrainResult,
    )
    from paceline.storage import ObjectStore

Settings = Mapping[str, Any]


def publish(
    directory: Path | str,
    url: str,
    *,
    model_id: str,
    version: str,
    link: str | float | None = None,
    sign: Path | str | None = None,
    settings: Settings | None = None,
    state: Path | str | None = None,
) -> Published:
    """Digest the model in ``directory`` and upload it with its manifest below ``url``
    (s3://bucket/prefix).

    The same bytes again upload nothing. ``link`` is the workers', from which sizes of pieces and
    chunks follow; ``sign`` a private key (`paceline keys new`). The S3 server is the installation's
    (in ``state``, or of this user's login), unless ``settings`` name another or there is none.
    Credentials are AWS's, as boto3 finds them. Raises Conflict where the version has other bytes,
    AccessDenied, SourceMissing.
    """
    from paceline.manifest import load_key, publish_model, published_record
    from paceline.storage import parse_url

    if not url.startswith("s3://") or not parse_url(url)[0]:
        raise InvalidInput("not a destination", got=url, wanted="s3://bucket/prefix")
    profile, store = profile_and_store(settings, state)
    began = time.monotonic()
    manifest = publish_model(
        directory,
        url,
        model_id=model_id,
        version=version,
        store=store,
        link_mbit=link_mbit(link) if link else profile.cluster.link_mbit,
        piece_hash=profile.security.piece_hash,
        key=load_key(Path(sign)) if sign else None,
    )
    return published_record(manifest, url, store, time.monotonic() - began)


def distribute(
    source: Path | str,
    into: Path | str,
    workers: int | Sequence[str] = 4,
    *,
    link: str | float | None = None,
    topology: str = "auto",
    racks: int = 1,
    digest: str = "",
    model_id: str = "",
    version: str = "",
    activate: bool = True,
    settings: Settings | None = None,
    state: Path | str | None = None,
) -> Distribution:
    """Relay the model at ``source`` (a directory or s3://bucket/prefix) to ``workers`` below the
    directory ``into``, on this machine, and verify every byte there.

    Called again it resumes. The S3 server is found as by ``publish``. On an installation's nodes:
    ``Client.distribute``. Raises as ``paceline.standalone.distribute``.
    """
    from paceline.manifest import TrustPolicy
    from paceline.relay.store import StorePolicy
    from paceline.standalone import distribute as relay

    objects = None
    if str(source).startswith("s3://"):
        profile, objects = profile_and_store(settings, state)
    else:
        profile = _profile("embedded", settings)
    return relay(
        source,
        into,
        workers,
        topology=topology,
        racks=racks,
        link_mbit=link_mbit(link) if link else None,
        objects=objects,
        digest=digest,
        model_id=model_id,
        version=version,
        trust=TrustPolicy.of(profile.security),
        activate=activate,
        max_failed=profile.relay.max_failed,
        policy=StorePolicy.of(profile),
    )


def forecast(
    size: str | int,
    workers: int,
    link: str | float,
    *,
    external: str | float | None = None,
    disk: str | float | None = None,
    racks: int = 0,
    oversubscription: float = 1.0,
    topology: str = "auto",
) -> PlanTable:
    """Return what each topology would take for ``size`` to ``workers``; nothing moves.

    ``link`` is each worker's, ``external`` the one to the source (default: as fast), ``disk`` what
    a worker's disk writes (default: no bound). Raises InvalidInput for what cannot be.
    """
    from paceline.plan import FleetDescription, plan_table
    from paceline.schemas import Topology

    given = _fleet(size, workers, link, external, disk, racks, oversubscription)
    return plan_table(FleetDescription(**given), Topology(topology))


def estimate(
    model: Path | str,
    accelerator: str,
    *,
    ranks: int | Sequence[int] = (8, 64, 512),
    meshes: Sequence[str] = (),
    tokens: float | None = None,
    context: int | None = None,
    rank_sequences: int = 4,
    batch_sequences: int | None = None,
    precision: str | None = None,
    vocabulary: int = 32_768,
    profile: str = "embedded",
    settings: Settings | None = None,
) -> MeshEstimates:
    """Return what training ``model`` would take on meshes of accelerators: seconds of a step by
    what they are spent on, tokens a second, efficiency, bytes of a rank, and for ``tokens`` hours,
    energy and price; nothing runs.

    ``model`` is a directory, its config.json, or a number of parameters ("7B") with ``vocabulary``
    tokens; ``accelerator`` "H100", "H200", "A100", or one of [hardware] in ``profile``; ``meshes``
    are such as "shard8xtp8" (default: the usual ones), in which dp takes the ranks that are left. A
    step has ``batch_sequences`` rows of ``context`` tokens, or ``rank_sequences`` for each rank.
    Raises InvalidInput for what is not known or cannot be, and where the model fits on no mesh.
    """
    from paceline.jobs import DescribedModel, estimate_meshes

    return estimate_meshes(
        DescribedModel.read(model, vocabulary),
        accelerator,
        _profile(profile, settings),
        ranks=(ranks,) if isinstance(ranks, int) else ranks,
        meshes=meshes,
        tokens=tokens,
        context=context,
        rank_sequences=rank_sequences,
        batch_sequences=batch_sequences,
        precision=precision,
    )


def simulate(
    size: str | int,
    workers: int,
    link: str | float,
    *,
    external: str | float | None = None,
    disk: str | float | None = None,
    racks: int = 0,
    oversubscription: float = 1.0,
    topology: str = "auto",
    fail: float = 0.0,
    corrupt: float = 0.0,
    straggle: float = 0.0,
    seed: int = 0,
) -> SimulationReport:
    """Simulate a deployment with the real planner and coordinator, under a virtual clock.

    ``fail`` is the share of workers that die, ``corrupt`` that of transfers that arrive corrupt,
    ``straggle`` that of workers at a fifth of the link. ``violations`` of the report is empty where
    every invariant held.
    """
    from paceline.schemas import Topology
    from paceline.simulation import Scenario, simulate as run

    given = _fleet(size, workers, link, external, disk, racks, oversubscription)
    return run(
        Scenario(
            topology=Topology(topology),
            fail=fail,
            corrupt=corrupt,
            straggle=straggle,
            seed=seed,
            **given,
        )
    )


def train(
    output: Path | str,
    *,
    text: Path | str | None = None,
    snapshot: Path | str | None = None,
    model: Path | str | None = None,
    checkpoints: str | None = None,
    settings: Settings | None = None,
    run_id: str | None = None,
    on_event: Callable[[RankEvent], None] | None = None,
    cancel: threading.Event | None = None,
) -> TrainResult:
    """Train on this machine alone and return the result; the same call again goes on where it
    stopped.

    ``text`` is a directory to learn from (default: Python's standard library), ``model`` the one to
    start from (default: a new one), ``output`` keeps data, checkpoints and the model. Ranks are
    processes of their own: call it below ``if __name__ == "__main__"``. Raises Cancelled once
    ``cancel`` is set, after every rank has saved its state.
    """
    from paceline.training import single

    if text is not None and snapshot is not None:
        raise InvalidInput("two sources of data", got="text and snapshot", wanted="one of them")
    asked = single.TrainingRequest(
        output=Path(output),
        profile=_profile("local", settings),
        source=None if text is None else str(Path(text).absolute()),
        snapshot_url=None if snapshot is None else str(snapshot),
        model=None if model is None else Path(model),
        checkpoints=checkpoints,
    )
    with single.locked_output(asked.output):
        return single.run(single.prepare(asked, run_id), on_event=on_event, cancel=cancel)


def cost(
    state: Path | str | None = None, *, by: By | None = None, profile: str | None = None
) -> pd.DataFrame:
    """Return the installation's trainings and attempts of jobs as a table, one row each or summed
    up ``by`` model, job, team, project or day: seconds and price by class of time, price in total,
    a step, 1,000 tokens and an epoch.

    Prices are those of [prices] in ``profile`` (default: the installation's). A figure that was not
    recorded, or has no price, is missing, and ``unknown`` says why. Needs the extra flows (pandas).
    """
    import pandas as pd

    from paceline.jobs import cost_of, cost_row, costs_of_installation, grouped

    found = costs_of_installation(find_installation(None if state is None else Path(state)))
    prices = load_profile(profile).prices if profile else found.prices
    costs = [cost_of(each, prices) for each in found.usages]
    return pd.DataFrame([cost_row(each) for each in (grouped(costs, by) if by else costs)])


def evaluate(
    models: Mapping[str, Path | str] | Path | str,
    snapshot: Path | str,
    *,
    settings: Settings | None = None,
    state: Path | str | None = None,
) -> EvaluationReport:
    """Score models on the held-out split of ``snapshot``, beside an n-gram model and compressors;
    several models, by name, are compared in pairs.

    ``snapshot`` is a snapshot's directory (`paceline.train` leaves one below ``data/snapshots``) or
    its URL; ``models`` are as for ``load``. In this process, on a GPU that has room, else the CPU;
    nothing is recorded, so a promotion needs `paceline evaluate`. Raises as
    ``paceline.data.load_snapshot``; a model that cannot be scored is in the report's ``failures``.
    Of what is on S3 or in the registry, the server is found as by ``publish``. A module of user
    code runs where ``security.code_sources`` allow it: those of ``settings``, or where something is
    on S3 or in the registry those of the installation with ``settings``.
    """
    from paceline.evaluation import AllowedCode, compare
    from paceline.storage import DiskStore

    named = models if isinstance(models, Mapping) else {"candidate": models}
    where, objects = str(snapshot), None
    if any(str(each).startswith(("s3://", "models:/")) for each in (where, *named.values())):
        profile, objects = profile_and_store(settings, state)
    else:
        profile = _profile("embedded", settings)
    remote = where.startswith("s3://")
    if not remote and not where.startswith("file://"):
        where = DiskStore.url_of(Path(where).absolute())
    store = objects if remote and objects is not None else DiskStore()
    with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
        here = {
            name: model_directory(str(each), Path(scratch) / name, state, objects)
            for name, each in named.items()
        }
        allowed = AllowedCode(profile.security.code_sources, Path(scratch) / "code")
        return compare(here, where, store, Path(scratch) / "cache", profile.evaluation, allowed)


def load(
    model: Path | str, into: Path | str | None = None, *, state: Path | str | None = None
) -> TextModel:
    """Open a model to read and write text: its ``forward``, ``tokenizer`` and limits, on the CPU.

    ``model`` is a directory (of transformers, or an export) or its file:// URL, s3://bucket/prefix,
    or models:/name@alias of the installation. What is elsewhere is downloaded to ``into`` (default:
    a temporary directory, deleted before this returns). ``paceline.evaluation.generate`` writes
    text.
    """
    from paceline.evaluation import TextModel

    with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
        where = Path(scratch) / "model" if into is None else Path(into)
        return TextModel.open(model_directory(str(model), where, state))


def model_directory(
    model: str, into: Path, state: Path | str | None = None, objects: ObjectStore | None = None
) -> Path:
    """Return ``model``'s directory; one that is elsewhere is downloaded to ``into``, from
    ``objects`` (default: the installation's store).

    Raises SourceMissing for what is none of a directory, file:///…, s3://… and models:/….
    """
    from paceline.evaluation import download_model
    from paceline.registry import resolve_source
    from paceline.storage import DiskStore

    if model.startswith("file://"):
        model = str(DiskStore.path_of(model))
    if (here := Path(model)).is_dir():
        return here
    runtime = installation(state)
    if model.startswith("models:/") and runtime is not None:
        model = resolve_source(model, runtime)[0]
    if not model.startswith("s3://"):
        raise SourceMissing(
            "no model here",
            got=model,
            wanted="a directory, s3://bucket/prefix, or models:/name@alias of an installation",
        )
    return download_model(model, into, objects or _store_of(Profile(), runtime))


def installation(state: Path | str | None = None) -> Runtime | None:
    """Return the installation that a call here means, None without one; raises NotReady for a
    ``state`` in which none runs."""
    try:
        found = find_installation(None if state is None else Path(state))
    except NotReady:
        if state is not None:
            raise
        return None
    return runtime_of(Client.of(found))


def _profile(name: str, settings: Settings | None) -> Profile:
    return load_profile(name, {key: _plain(value) for key, value in (settings or {}).items()})


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def profile_and_store(
    overrides: Settings | None, state: Path | str | None = None, named: str | None = None
) -> tuple[Profile, ObjectStore]:
    """Return the settings and the S3 store that a call means.

    They are those of the installation in ``state``, here or of this user's login, with
    ``overrides``. Where the caller names a profile or a key of ``objects``, or there is no
    installation, they are the profile's (default: embedded).
    """
    given = {key: _plain(value) for key, value in (overrides or {}).items()}
    elsewhere = named is not None or any(key.startswith("objects") for key in given)
    if elsewhere or (runtime := installation(state)) is None:
        profile = load_profile(named or "embedded", given)
        return profile, _store_of(profile, None)
    return with_overrides(runtime.profile, given), _store_of(runtime.profile, runtime)


def _store_of(profile: Profile, runtime: Runtime | None) -> ObjectStore:
    """Return the store of the installation, else the one that ``profile`` names."""
    from paceline.storage import ObjectStore

    return ObjectStore.from_runtime(runtime) if runtime else ObjectStore(object_access(profile))


def _fleet(
    size: str | int,
    workers: int,
    link: str | float,
    external: str | float | None,
    disk: str | float | None,
    racks: int,
    oversubscription: float,
) -> dict[str, Any]:
    given = {
        "size_bytes": size_bytes(size),
        "workers": workers,
        "link_mbit": link_mbit(link),
        "racks": racks,
        "oversubscription": oversubscription,
    }
    named = {"external_mbit": external, "disk_mbit": disk}
    return given | {name: link_mbit(speed) for name, speed in named.items() if speed is not None}
