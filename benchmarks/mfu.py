"""Model flops utilisation and memory of a model of about 1 B parameters in bf16 on one GPU:
``paceline.training.loop.loop`` beside plain loops, interleaved, on the same device.

``ours`` is the loop as jobs run it, with deterministic kernels; ``free`` without them; ``plain`` a
loop in nanoGPT's style; ``fsdp2`` the same loop over ``fully_shard`` with a bf16 policy, as
torchtitan's is on one GPU. All compile unless ``--eager``.

    python benchmarks/mfu.py [--batch 8] [--context 2048] [--layers 18] [--steps 10] [--pairs 5]
                             [--eager] [--only ours plain]
    python benchmarks/mfu.py --quick [--compile]   # a tiny model on the CPU: does it work?

MFU counts as PaLM's does (``paceline.models.ModelShape``) against the matmul peak measured in
the same process. Without a GPU it says that it was not run, and why.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from paceline.config import TrainingSettings
from paceline.data import Batch
from paceline.models import ModelConfig, ModelShape, config_for, count_parameters, new_model
from paceline.training.loop import (
    Group,
    Progress,
    StepReport,
    TransformerWorkload,
    new_optimizer,
    train,
)
from paceline.training.metrics import StepMetrics, matmul_peak
from paceline.training.parallel import Mesh, MeshSpec, parallelise

RESULT = Path(__file__).resolve().parent / "results" / "mfu.json"
VOCABULARY = 50_304
STEP_S = 1800.0  # the first one compiles


@dataclass
class OneBatch:
    """A stream that gives the same batch again and again."""

    batch: Batch
    context: int
    global_batch: int
    data_wait_s: float = 0.0
    position: dict[str, Any] = field(default_factory=dict)
    quarantined: dict[str, str] = field(default_factory=dict)

    def next(self) -> Batch:
        return self.batch

    def close(self) -> None:
        pass

    def __enter__(self) -> OneBatch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


@dataclass(frozen=True)
class Case:
    """What is trained, and where."""

    config: ModelConfig
    rows: int
    device: torch.device
    compile: bool

    @property
    def tokens(self) -> int:
        return self.rows * self.config.context

    def batch(self) -> Batch:
        shape = (self.rows, self.config.context + 1)
        tokens = np.random.default_rng(0).integers(0, self.config.vocab_size, shape, dtype=np.int32)
        return Batch(
            step=0,
            inputs_BT=tokens[:, :-1],
            targets_BT=tokens[:, 1:],
            weights_BT=np.ones((self.rows, self.config.context), dtype=np.float32),
            rows=range(self.rows),
            global_tokens=float(self.tokens),
        )


def ours(case: Case) -> Iterator[None]:
    """A step of our loop each time it is asked for; between them its thread stands still."""
    settings = TrainingSettings(
        ranks=1,
        steps=10**9,
        schedule="wsd",
        batch_sequences=case.rows,
        precision="bfloat16",
        compile=case.compile,
    )
    workload = TransformerWorkload(case.config)
    model = workload.build().to(case.device)
    mesh = Mesh(MeshSpec(), device_type=case.device.type)
    parallel = parallelise(model, mesh, settings, workload)
    wanted: queue.Queue[bool] = queue.Queue(1)
    done: queue.Queue[BaseException | None] = queue.Queue(1)
    over = threading.Event()

    def rest() -> None:
        if not wanted.get():
            over.set()

    def stepped(_: StepReport) -> None:
        if not over.is_set():
            done.put(None)
            rest()

    def work() -> None:
        rest()
        try:
            train(
                parallel,
                workload,
                new_optimizer(parallel.modules, settings),
                OneBatch(case.batch(), case.config.context, case.rows),
                settings,
                Group(),
                progress=Progress(),
                device=case.device,
                step_metrics=StepMetrics.of(
                    settings, parallel, Group(), case.device, config=case.config
                ),
                on_step=stepped,
                should_stop=over.is_set,
            )
        except BaseException as error:  # noqa: BLE001 - raised where it was asked for
            done.put(error)

    thread = threading.Thread(target=work, name="ours", daemon=True)
    thread.start()
    try:
        while True:
            wanted.put(True)
            failed = done.get(timeout=STEP_S)
            if failed is not None:
                raise failed
            yield
    finally:
        if thread.is_alive():
            wanted.put(False)
            thread.join(STEP_S)


def plain(case: Case) -> Iterator[None]:
    """The loop of nanoGPT: compiled model, autocast, clipping, fused AdamW."""
    model = new_model(case.config, 0).to(case.device)
    run = torch.compile(model) if case.compile else model
    yield from plain_steps(case, model, run, torch.autocast(case.device.type, torch.bfloat16))


def fsdp2(case: Case) -> Iterator[None]:
    """The same loop with ``fully_shard`` around each block, compiled block by block."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        backend = "nccl" if case.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh(case.device.type, (1,))
    model = new_model(case.config, 0).to(case.device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers.values():
        if case.compile:
            block.compile()  # type: ignore[no-untyped-call]
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    try:
        yield from plain_steps(case, model, model, nullcontext())
    finally:
        dist.destroy_process_group()


def plain_steps(
    case: Case, model: nn.Module, run: Callable[..., Any], half: AbstractContextManager[Any]
) -> Iterator[None]:
    """Step without end: loss, backward, clipping, fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    batch = case.batch()
    inputs_BT, targets_BT = (
        torch.from_numpy(each.astype(np.int64)).to(case.device)
        for each in (batch.inputs_BT, batch.targets_BT)
    )
    while True:
        with half:
            logits_BTV = run(inputs_BT)
            loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def rate(case: Case, steps: Iterator[None], count: int) -> float:
    """Return the tokens a second of ``count`` steps."""
    _finish(case.device)
    started = time.perf_counter()
    for _ in range(count):
        next(steps)
    _finish(case.device)
    return case.tokens * count / (time.perf_counter() - started)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


KINDS: dict[str, Callable[[Case], Iterator[None]]] = {
    "ours": ours,
    "free": ours,
    "plain": plain,
    "fsdp2": fsdp2,
}


@contextmanager
def deterministic(is_on: bool) -> Iterator[None]:
    """Let torch use deterministic kernels only."""
    torch.use_deterministic_algorithms(is_on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _allocated(device: torch.device, *, reset: bool = False) -> int:
    if device.type != "cuda":
        return 0
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def measure(case: Case, steps: int, pairs: int, kinds: Sequence[str]) -> dict[str, Any]:
    """Return each kind's MFU and peak memory, and ours over the others'; rounds are interleaved."""
    running: dict[str, Iterator[None]] = {}
    found: dict[str, list[float]] = {name: [] for name in kinds}
    own: dict[str, int] = {}  # bytes on the GPU between steps
    for name in kinds:
        before = _allocated(case.device)
        running[name] = KINDS[name](case)
        with deterministic(name == "ours"):
            rate(case, running[name], 3)  # compiles, warms
        own[name] = _allocated(case.device) - before
    peaks: dict[str, int] = {}
    for number in range(pairs):
        for name in kinds if number % 2 == 0 else reversed(kinds):
            before = _allocated(case.device, reset=True)
            with deterministic(name == "ours"):
                found[name].append(rate(case, running[name], steps))
            peaks[name] = own[name] + _peak(case.device) - before
    for steps_of in running.values():
        steps_of.close()  # type: ignore[attr-defined]  # they are generators
    peak = matmul_peak(case.device.type, torch.bfloat16, torch.get_num_threads())
    flops = ModelShape.of(case.config).flops_per_token()
    base = kinds[0]
    return {
        "parameters": count_parameters(case.config),
        "context": case.config.context,
        "batch": case.rows,
        "device": torch.cuda.get_device_name() if case.device.type == "cuda" else "cpu",
        "peak_flops_measured": peak,
        **{f"{name}_tokens_per_second": statistics.median(rates) for name, rates in found.items()},
        **{f"{name}_mfu": statistics.median(rates) * flops / peak for name, rates in found.items()},
        **{f"{name}_peak_gb": round(peaks[name] / 1e9, 2) for name in kinds},
        **{
            f"{base}_over_{name}": [
                round(a / b, 4) for a, b in zip(found[base], found[name], strict=True)
            ]
            for name in kinds[1:]
        },
    }


def billion(context: int, layers: int) -> ModelConfig:
    """Return a model of about 1 B parameters with 18 layers."""
    return ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=context,
    )


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tiny", "--quick", action="store_true")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--compile", action="store_true", help="with --tiny: compile, as on a GPU")
    asked = parser.parse_args(arguments)
    result: dict[str, Any] = {"benchmark": "mfu"}
    if asked.tiny:
        case = Case(config_for(20_000, 32), 2, torch.device("cpu"), compile=asked.compile)
        result |= {"run": True, "tiny": True, **measure(case, 2, 2, asked.only)}
    elif torch.cuda.is_available():
        config = billion(asked.context, asked.layers)
        case = Case(config, asked.batch, torch.device("cuda"), compile=not asked.eager)
        found = measure(case, asked.steps, asked.pairs, asked.only)
        result |= {"run": True, "compiled": case.compile, **found}
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    else:
        built = (
            "a CPU build" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
        )
        result |= {"run": False, "why": f"no GPU here; torch {torch.__version__} is {built}"}
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
