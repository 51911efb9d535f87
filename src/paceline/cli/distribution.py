"""`paceline publish` and `paceline distribute`: a model to object storage, and to workers.

Each has two forms. Given a location (an S3 URL, a directory) it runs in this process, without any
Paceline server; without one it runs as a flow of the running installation.
"""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.commands import Sections
from paceline.cli.flows import FlowCall
from paceline.cli.options import (
    LINK,
    SIZE,
    is_typed,
    json_option,
    log_only_defects,
    next_line,
    objects_of,
    profile_options,
    read_profile,
    refuse_typed,
    resolve_run_id,
    run_id_option,
    show,
    state_directory,
    state_option,
    terminated_by_signals,
    to_option,
)
from paceline.config import Runtime, find_installation, load_runtime
from paceline.errors import InvalidInput, NotReady
from paceline.schemas import Topology

if TYPE_CHECKING:
    from paceline.schemas import Distribution, PieceHash


directory_type = click.Path(path_type=Path)


@click.command(
    cls=Sections,
    sections={
        "A directory": "model_id version",
        "A directory, with URL": "allow_older",
        "With URL": "sign piece chunk piece_hash link discard_unfinished profile overrides",
        "A source of a hub or registry": "extra_origin",
        "Without URL, as a run": "run_id",
    },
)
@click.argument("source", metavar="DIRECTORY | SOURCE")
@click.argument("url", required=False)
@click.option("--model", "model_id", default="", help="Name of the model (of a directory).")
@click.option("--version", default="", help="Version to publish it as (of a directory).")
@click.option("--sign", type=directory_type, default=None, help="Private key (paceline keys new).")
@click.option("--piece", **SIZE, help="Piece size (default: from the model's).")
@click.option("--chunk", **SIZE, help="Chunk size (default: from model and link).")
@click.option(
    "--piece-hash",
    type=click.Choice(["blake3", "sha256"]),
    help="Hash of the pieces (default: sha256 if security.fips, else blake3).",
)
@click.option("--link", **LINK, help="The workers' link, e.g. 10Gbps.")
@click.option("--allow-older", is_flag=True, help="Publish although a newer version is there.")
@click.option(
    "--discard-unfinished",
    is_flag=True,
    help="Drop what earlier attempts left: parts of files, their claim to the version.",
)
@click.option(
    "--extra-origin", **SIZE, help="Read so much of a hub or registry beyond its origin budget."
)
@profile_options
@run_id_option
@state_option
@json_option
def publish(
    source: str,
    url: str | None,
    model_id: str,
    version: str,
    sign: Path | None,
    piece: int | None,
    chunk: int | None,
    piece_hash: PieceHash | None,
    link: float | None,
    allow_older: bool,
    discard_unfinished: bool,
    extra_origin: int | None,
    profile: str,
    overrides: tuple[str, ...],
    run_id: str | None,
    state: Path | None,
    as_json: bool,
) -> int:
    """Digest DIRECTORY and upload it with its manifest below URL (s3://bucket/prefix).

    The manifest's place is URL/manifest.json. Without URL, it is the installation's bucket: as a
    run where the installation has its flows here, else from here, with your own S3 credentials.

    SOURCE is hf://org/name[@revision] or oci://host/repository:tag: it is imported, once, under its
    own name and its commit or digest (without URL: into the installation's bucket).
    """
    from paceline.storage import is_remote

    foreign, directory = is_remote(source), Path(source)
    if foreign == bool(model_id or version) or (not foreign and not (model_id and version)):
        raise InvalidInput(
            "a directory is published under a name, and a remote model has its own",
            got=f"{source}, --model {model_id or '(none)'}, --version {version or '(none)'}",
            wanted="DIRECTORY --model NAME --version VERSION, or hf://org/name@revision",
        )
    refuse_typed(
        "A directory, with URL" if foreign else "A source of a hub or registry", got=source
    )
    if url is None and (is_typed("profile") or any(x.startswith("objects") for x in overrides)):
        raise InvalidInput(
            "without a URL a model goes to the installation's bucket",
            got="--profile or --set objects.…",
            wanted="paceline publish SOURCE s3://bucket/prefix …",
        )
    runtime = _without_flows(state) if url is None else None
    if runtime is not None and not foreign:
        url = f"{runtime.models_url}/{model_id}/{version}"
    if url is None and not foreign:
        refuse_typed(
            "With URL", "A directory, with URL", got=f"{source} without URL",
            do="Name one: `paceline publish DIRECTORY s3://bucket/prefix …`.",
        )  # fmt: skip
        call = FlowCall(state=state, run_id=run_id, as_json=as_json)
        where = str(directory.absolute())
        flow = "publish.publish_model"
        return call.run(flow, directory=where, model_id=model_id, version=version)
    refuse_typed("Without URL, as a run", got="a publish from this machine")
    from paceline.manifest import (
        discard_unfinished as discard,
        import_model,
        load_key,
        publish_model,
        published_record,
    )
    from paceline.plan import origin_cap_bytes
    from paceline.registry import import_place
    from paceline.storage import parse_url, remote_model

    settings, store = objects_of(state, profile, overrides)
    found = remote_model(source, settings) if foreign else None
    if url is None:
        assert found is not None
        url = import_place(found, runtime or load_runtime(state_directory(state)))
    if not url.startswith("s3://") or not parse_url(url)[0]:
        raise InvalidInput("not a destination", got=url, wanted="s3://bucket/prefix")
    if settings.security.fips and piece_hash == "blake3":
        raise InvalidInput(
            "this installation publishes only SHA-256 (security.fips)",
            got="--piece-hash blake3",
            wanted="--piece-hash sha256, or no option",
        )
    key = load_key(sign) if sign else None
    log_only_defects()
    began = time.monotonic()
    if discard_unfinished:
        discard(url, store)
    from paceline.cli.progress import PublishBars

    with terminated_by_signals(), PublishBars() as bars:
        common: dict[str, Any] = {
            "store": store,
            "link_mbit": link or settings.cluster.link_mbit,
            "piece_bytes": piece or 0,
            "chunk_bytes": chunk or 0,
            "piece_hash": piece_hash or settings.security.piece_hash,
            "key": key,
            "on_progress": bars.show,
        }
        if found is not None:
            cap = origin_cap_bytes(found.total_size) + (extra_origin or 0)
            manifest = import_model(found, url, cap_bytes=cap, **common)
        else:
            manifest = publish_model(
                directory,
                url,
                model_id=model_id,
                version=version,
                allow_older=allow_older,
                **common,
            )
    if store.has_conditional_writes is False:
        click.echo(
            f"! {store.endpoint_url} has no conditional writes (If-None-Match): another publish of "
            "other files as this version, at the same time, would not have been refused in time",
            err=True,
        )
    done = published_record(manifest, url, store, time.monotonic() - began)
    there = done.url if runtime is None else f"{done.model_id} {done.version}"
    show(
        done,
        as_json,
        f"{done.model_id} {done.version} at {done.url}: {done.bytes:,} bytes in {done.files} "
        f"files, {done.pieces} pieces ({done.piece_hash}), {done.uploaded_files} uploaded in "
        f"{done.seconds:.1f} s",
        f"digest {done.manifest_digest}",
        *([f"signed by {done.signed_by}"] if done.signed_by else []),
        next_line(f"distribute {there}"),
    )
    return 0


def _without_flows(state: Path | None) -> Runtime | None:
    """Return the installation that runs no flows here, with its settings; None without one."""
    from paceline.python_api import installation

    try:
        found = installation(state)
    except NotReady:  # the flow that is called says so
        return None
    return None if found is None or found.runs_flows_here else found


@click.command(
    cls=Sections,
    sections={
        "Without --into, on an installation": "cancel_on_interrupt run_id",
        "With --into, on this machine": "into workers topology racks link port extra_origin named "
        "as_version profile overrides",
    },
)
@click.argument("model_id", metavar="MODEL_ID | SOURCE")
@click.argument("version", required=False)
@to_option
@click.option("--stage-only", is_flag=True, help="Do not activate it.")
@click.option(
    "--cancel-on-interrupt",
    is_flag=True,
    help="Ctrl-C ends the deployment too; otherwise it goes on (paceline watch).",
)
@click.option(
    "--into",
    type=directory_type,
    default=None,
    help="Bring SOURCE (a directory or s3://bucket/prefix) to workers below this directory, here "
    "and now, without a server.",
)
@click.option(
    "--workers", type=click.IntRange(min=1), default=4, show_default=True, help="How many."
)
@click.option("--topology", type=click.Choice([str(each) for each in Topology]), default="auto",
              show_default=True, help="How workers pass pieces on.")  # fmt: skip
@click.option("--racks", type=int, default=1, show_default=True, help="Their racks.")
@click.option("--link", **LINK, help="Limit of each worker's link, e.g. 100Mbit.")
@click.option("--digest", default="", help="SHA-256 that the manifest must have.")
@click.option("--port", type=int, default=0, help="The first worker's port.")
@click.option("--allow-older", is_flag=True, help="Also where a directory holds a newer version.")
@click.option("--extra-origin", **SIZE, help="Read so much of SOURCE beyond its origin budget.")
@click.option("--model", "named", default="", help="What a plain directory is called.")
@click.option("--as-version", default="", help="And its version.")
@profile_options
@run_id_option
@state_option
@json_option
def distribute(
    model_id: str,
    version: str | None,
    targets: tuple[str, ...],
    stage_only: bool,
    cancel_on_interrupt: bool,
    into: Path | None,
    workers: int,
    topology: str,
    racks: int,
    link: float | None,
    digest: str,
    port: int,
    allow_older: bool,
    extra_origin: int | None,
    named: str,
    as_version: str,
    profile: str,
    overrides: tuple[str, ...],
    run_id: str | None,
    state: Path | None,
    as_json: bool,
) -> int:
    """Relay VERSION of MODEL_ID to the nodes, verify it there, and switch to it.

    Or what SOURCE names: s3://bucket/prefix, models:/name@alias, models:/name/7 (7 is MLflow's
    own number of a version), hf://org/name@revision or oci://host/repository:tag. With
    --into: relay the model at SOURCE to that many workers on this machine.
    """
    if into is None:
        refuse_typed("With --into, on this machine", got=f"{model_id} without --into")
        named_here = "://" in model_id or model_id.startswith("models:/")
        if (version is None) != named_here:
            raise InvalidInput(
                "no version" if version is None else "a source has its own version",
                got=f"{model_id} {version or ''}".strip(),
                wanted="paceline distribute MODEL_ID VERSION, SOURCE, or SOURCE --into DIRECTORY",
            )
        selector = ";".join(targets)
        if not (runtime := find_installation(state)).runs_flows_here:
            from paceline.cli.login import distribute as distribute_there

            return distribute_there(
                runtime,
                model_id,
                version,
                selector,
                activate=not stage_only,
                allow_older=allow_older,
                digest=digest,
                cancels=cancel_on_interrupt,
                run_id=run_id and resolve_run_id(runtime, run_id),
                as_json=as_json,
            )
        call = FlowCall(state=state, run_id=run_id, as_json=as_json)
        what = {"source_url": model_id} if named_here else {"model_id": model_id}
        return call.run(
            "distribute.distribute_model",
            cancels=cancel_on_interrupt,
            **what,
            version=version or "",
            selector=selector or None,
            activate=not stage_only,
            allow_older=allow_older,
            manifest_digest=digest or None,
        )
    refuse_typed("Without --into, on an installation", got=f"--into {into}")
    if version is not None:
        raise InvalidInput(
            "one source at a time", got=f"{model_id} {version}", wanted="SOURCE --into DIRECTORY"
        )
    from paceline.manifest import TrustPolicy
    from paceline.registry import resolve_source
    from paceline.relay.store import StorePolicy
    from paceline.standalone import distribute as bring
    from paceline.storage import is_remote

    if is_remote(model_id):
        raise InvalidInput(
            "a remote model is imported first",
            got=model_id,
            wanted="a directory, s3://bucket/prefix or models:/name@alias",
            do=f"Run `paceline publish {model_id} s3://bucket/prefix`, then distribute that.",
        )
    if model_id.startswith("models:/"):
        model_id = resolve_source(model_id, load_runtime(state_directory(state)))[0]
    if model_id.startswith("s3://"):
        settings, objects = objects_of(state, profile, overrides)
    else:
        settings, objects = read_profile(profile, overrides), None
    log_only_defects()
    from paceline.cli.progress import RelayBars

    with terminated_by_signals(), RelayBars() as bars:
        done = bring(
            model_id,
            into,
            workers,
            targets=[name for each in targets for name in each.split(",")] or None,
            topology=topology,
            racks=racks,
            link_mbit=link,
            objects=objects,
            digest=digest,
            model_id=named,
            version=as_version,
            trust=TrustPolicy.of(settings.security),
            allow_older=allow_older,
            activate=not stage_only,
            max_failed=settings.relay.max_failed,
            first_port=port,
            extra_origin_bytes=extra_origin or 0,
            policy=StorePolicy.of(settings),
            on_progress=bars.show,
            on_notice=lambda said: bars.say(f"! {said}"),
        )
    show(done, as_json, _described(done))
    return 0


def _described(done: Distribution) -> str:
    earlier = done.origin_before_bytes
    before = f" (of that {earlier:,} before this call)" if earlier else ""
    lines = [
        f"{done.model_id} {done.version} on {done.workers_complete} of {done.workers} workers in "
        f"{done.seconds:.1f} s by {done.topology.value}"
        + (f" ({done.ratio:.2f} x the bound)" if done.ratio else ""),
        f"{done.total_bytes:,} bytes; from the source {done.origin_bytes:,}{before}, from peers "
        f"{done.received_bytes:,}, already there {_there(done):,}, between racks "
        f"{done.cross_rack_bytes:,}",
        f"digest {done.manifest_digest}",
    ]
    lines += [
        f"! {count} piece{'' if count == 1 else 's'} from {source} did not match, and came again"
        for source, count in done.corrupt_from.items()
    ]
    lines += [f"! {name} failed: {why.message}" for name, why in done.workers_failed.items()]
    first, *others = sorted(each.path for each in done.receipts)
    there = f" and {len(others)} more" if others else ""
    lines.append(f"made:     {first}{there}")
    if (Path(first) / "config.json").is_file():
        chat = " --chat" if (Path(first) / "chat_template.jinja").is_file() else ""
        lines.append(f"next:     paceline generate {shlex.quote(first)} PROMPT{chat}")
    return "\n".join(lines)


def _there(done: Distribution) -> int:
    """Return how many of the workers' bytes did not have to be transferred."""
    moved = (
        done.origin_bytes - done.origin_before_bytes + done.received_bytes - done.refetched_bytes
    )
    return max(0, done.workers_complete * done.total_bytes - moved)
