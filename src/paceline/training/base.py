"""The demo's base model: initialised, then trained for a recorded budget on the snapshot.

``train_base`` runs in this process; ``python -m paceline.training.base`` reads a BaseSpec (one
line of JSON) from standard input and writes a BaseResult as the last line of standard output. The
same spec, machine and thread count give the same bytes. It writes no checkpoints: the budget is
small on purpose.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from paceline.config import DataSettings, ModelSettings, TrainingSettings
from paceline.errors import PacelineError
from paceline.schemas import Record, Sha256
from paceline.storage import ObjectStore

if TYPE_CHECKING:
    from paceline.config import Runtime
    from paceline.training.loop import StepReport


class BaseSpec(Record):
    """The input of ``python -m paceline.training.base``."""

    state_dir: str = ""  # "": the node's own
    directory: str = ""  # where the model goes; "": the process publishes it
    publish_url: str = ""  # …/MODEL/VERSION in object storage
    snapshot_url: str
    snapshot_digest: Sha256
    purpose: str
    model: ModelSettings
    training: TrainingSettings  # the recipe; ``model.base_steps`` replaces its steps
    threads: int = Field(default=2, ge=1)


class BaseResult(Record):
    """The output of ``train_base``."""

    weights_digest: Sha256
    parameters: int
    steps: int
    first_loss: float | None  # nats per byte
    final_loss: float | None


def train_base(
    spec: BaseSpec, store: ObjectStore, on_step: Callable[[StepReport], None] | None = None
) -> BaseResult:
    """Train and write the base model to ``spec.directory`` (safetensors, config).

    Raises InvalidSnapshot where the data are for another purpose.
    """
    import torch

    from paceline.data import ShardCache, load_snapshot, open_stream, require_purpose
    from paceline.errors import InvalidInput
    from paceline.models import config_for, count_parameters, new_model, save_model, weights_digest
    from paceline.training.identity import stream_seed
    from paceline.training.loop import (
        Group,
        Progress,
        TransformerWorkload,
        new_optimizer,
        retain_freed_memory,
        train,
    )
    from paceline.training.parallel import Mesh, MeshSpec, cuts_of, parallelise

    snapshot = load_snapshot(spec.snapshot_url, store)
    require_purpose(snapshot, spec.purpose)
    if snapshot.digest != spec.snapshot_digest:
        raise InvalidInput("another snapshot", got=snapshot.digest, wanted=spec.snapshot_digest)
    retain_freed_memory()
    torch.set_num_threads(spec.threads)
    shape, steps = spec.model, spec.model.base_steps
    config = config_for(shape.parameters, shape.context, **cuts_of(spec.training.mesh))
    model = new_model(config, shape.seed)
    # by an optimiser of ours, whatever the training's: a base is the same for all of them
    warmup_steps = min(spec.training.warmup_steps, max(1, steps // 4))
    settings = spec.training.model_copy(update={"steps": steps, "warmup_steps": warmup_steps})
    workload = TransformerWorkload(config)
    parallel = parallelise(model, Mesh(MeshSpec()), settings, workload)
    progress = Progress()
    stream = open_stream(
        snapshot,
        "train",
        ShardCache(snapshot, store, Path(spec.state_dir) / "cache"),
        DataSettings(),
        context=config.context,
        global_batch=settings.batch_sequences,
        seed=stream_seed("base", shape.seed),
    )
    with stream:
        train(
            parallel,
            workload,
            new_optimizer(parallel.modules, settings),
            stream,
            settings,
            Group(),
            progress=progress,
            on_step=on_step,
        )
    save_model(model, config, Path(spec.directory))
    return BaseResult(
        weights_digest=weights_digest(Path(spec.directory)),
        parameters=count_parameters(config),
        steps=progress.step,
        first_loss=progress.first_loss,
        final_loss=progress.loss,
    )


def main() -> int:
    """Run the spec from standard input; return the exit code."""
    from paceline.config import load_runtime
    from paceline.training.loop import die_with_parent, use_passive_waiting

    die_with_parent()
    use_passive_waiting()
    try:
        spec = BaseSpec.model_validate_json(sys.stdin.readline())
        runtime = load_runtime(spec.state_dir)
        store = ObjectStore.from_runtime(runtime)
        if spec.directory:
            result = train_base(spec, store, _report)
        else:
            result = _train_and_publish(spec, runtime, store)
    except PacelineError as error:
        traceback.print_exc()
        sys.stderr.write(error.one_line() + "\n")
        return error.exit_code
    sys.stdout.write(result.model_dump_json() + "\n")
    return 0


def _train_and_publish(spec: BaseSpec, runtime: Runtime, store: ObjectStore) -> BaseResult:
    from paceline.manifest import publish_model

    profile = runtime.profile
    model_id, version = spec.publish_url.rsplit("/", 2)[1:]
    with tempfile.TemporaryDirectory(prefix="base-", dir=Path.cwd()) as scratch:
        result = train_base(spec.model_copy(update={"directory": scratch}), store, _report)
        publish_model(
            scratch,
            spec.publish_url,
            model_id=model_id,
            version=version,
            store=store,
            link_mbit=profile.cluster.link_mbit,
            piece_bytes=profile.relay.piece_bytes,
            chunk_bytes=profile.relay.chunk_bytes,
            piece_hash=profile.security.piece_hash,
        )
    return result


def _report(report: StepReport) -> None:
    from paceline.schemas import RankEvent

    event = RankEvent(event="step", rank=0, attempt=1, step=report.step, data={"loss": report.loss})
    sys.stdout.write(event.model_dump_json() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
