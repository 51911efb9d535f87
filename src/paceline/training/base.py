"""The demo's base model: initialised, then trained for a recorded budget on the snapshot.

``train_base`` runs in this process; ``python -m paceline.training.base`` reads a BaseSpec (one
line of JSON) from standard input and writes a BaseResult as the last line of standard output. The
same spec, machine and thread count give the same bytes. It writes no checkpoints: the budget is
small on purpose.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from paceline.config import DataSettings, ModelSettings, TrainingSettings
from paceline.data import Snapshot
from paceline.errors import PacelineError
from paceline.schemas.base import Record, Sha256
from paceline.storage import ObjectStore

if TYPE_CHECKING:
    from paceline.training.loop.loop import StepReport


class BaseSpec(Record):
    """The input of ``python -m paceline.training.base``."""

    state_dir: str
    directory: str  # where the model goes
    snapshot_url: str
    snapshot_digest: Sha256
    purpose: str
    model: ModelSettings
    training: TrainingSettings  # the recipe; ``model.base_steps`` replaces its steps
    threads: int = Field(default=2, ge=1)
    cache_dir: str = ""  # "": below the state directory


class BaseResult(Record):
    """The output of ``train_base``."""

    directory: str
    weights_digest: Sha256
    parameters: int
    steps: int
    first_loss: float | None  # nats per byte
    final_loss: float | None
    tokens_per_second: float
    seconds: float


def train_base(
    directory_out: Path,
    model_settings: ModelSettings,
    snapshot: Snapshot,
    store: ObjectStore,
    cache_dir: Path,
    *,
    training: TrainingSettings,
    purpose: str,
    threads: int = 2,
    on_step: Callable[[StepReport], None] | None = None,
) -> BaseResult:
    """Train and write the base model to ``directory_out`` (safetensors, config); return figures."""
    import torch

    from paceline.data import ShardCache, open_stream, require_purpose
    from paceline.models import config_for, count_parameters, new_model, save_model, weights_digest
    from paceline.training.identity import stream_seed
    from paceline.training.loop.group import Group
    from paceline.training.loop.loop import Progress, train_model
    from paceline.training.loop.optimizer import new_optimizer
    from paceline.training.loop.rank_process import keep_memory
    from paceline.training.parallel import cuts_of

    started = time.perf_counter()
    keep_memory()
    torch.set_num_threads(threads)
    config = config_for(model_settings.parameters, model_settings.context, **cuts_of(training.mesh))
    model = new_model(config, model_settings.seed)
    steps = model_settings.base_steps
    settings = training.model_copy(
        update={"steps": steps, "warmup_steps": min(training.warmup_steps, max(1, steps // 4))}
    )
    progress = Progress()
    require_purpose(snapshot, purpose)
    stream = open_stream(
        snapshot,
        "train",
        ShardCache(snapshot, store, cache_dir),
        DataSettings(),
        context=config.context,
        global_batch=settings.batch_sequences,
        seed=stream_seed("base", model_settings.seed),
    )
    with stream:
        train_model(
            model,
            new_optimizer(model, settings),
            stream,
            settings,
            Group(),
            progress=progress,
            on_step=on_step,
        )
    save_model(model, config, directory_out)
    return BaseResult(
        directory=str(directory_out),
        weights_digest=weights_digest(directory_out),
        parameters=count_parameters(config),
        steps=progress.step,
        first_loss=progress.first_loss,
        final_loss=progress.loss,
        tokens_per_second=progress.tokens / progress.seconds if progress.seconds else 0.0,
        seconds=time.perf_counter() - started,
    )


def main() -> int:
    """Run the spec from standard input; return the exit code."""
    from paceline.config import load_runtime
    from paceline.data import load_snapshot
    from paceline.errors import InvalidInput
    from paceline.training.loop.rank_process import die_with_parent, share_cores

    die_with_parent()
    share_cores()
    try:
        spec = BaseSpec.model_validate_json(sys.stdin.readline())
        runtime = load_runtime(spec.state_dir)
        store = ObjectStore.from_runtime(runtime)
        snapshot = load_snapshot(spec.snapshot_url, store)
        if snapshot.digest != spec.snapshot_digest:
            raise InvalidInput("another snapshot", got=snapshot.digest, wanted=spec.snapshot_digest)
        result = train_base(
            Path(spec.directory),
            spec.model,
            snapshot,
            store,
            Path(spec.cache_dir or Path(spec.state_dir) / "cache"),
            training=spec.training,
            purpose=spec.purpose,
            threads=spec.threads,
            on_step=_say_step,
        )
    except PacelineError as error:
        traceback.print_exc()
        sys.stderr.write(error.one_line() + "\n")
        return error.exit_code
    sys.stdout.write(result.model_dump_json() + "\n")
    return 0


def _say_step(report: StepReport) -> None:
    from paceline.schemas.training import RankEvent

    event = RankEvent(event="step", rank=0, attempt=1, step=report.step, data={"loss": report.loss})
    sys.stdout.write(event.model_dump_json() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
