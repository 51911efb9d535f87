"""``parallelise``: turn a plain model and a mesh into the ``Parallel`` that the loop drives.

``SingleStage`` is the one without pipeline stages: single, replicated, sharded or tensor-parallel.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from paceline.config import TrainingSettings
from paceline.errors import InvalidInput
from paceline.models import Transformer
from paceline.training.checkpoint import Stateful
from paceline.training.loop import Inputs, LossSums, Preferences, Workload, autocast, master_dtype
from paceline.training.parallel import clipping, context, sharded, tensor
from paceline.training.parallel.base import Parallel, compile_blocks, recompute_blocks
from paceline.training.parallel.checks import require_layout, require_uncut
from paceline.training.parallel.data_parallel import CompressionMemory, SentBytes, replicate
from paceline.training.parallel.mesh import Mesh
from paceline.training.parallel.pipeline import Pipelined, stage_of
from paceline.training.parallel.sharded import shard
from paceline.training.parallel.tensor import HasPlan, cut_planned


class SingleStage:
    """A ``Parallel`` without stages: this rank runs the module from end to end.

    ``run`` is ``module``, or the DDP wrapper that synchronises its gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        run: nn.Module,
        mesh: Mesh,
        settings: TrainingSettings,
        workload: Workload,
        sent: SentBytes,
        memory: CompressionMemory | None = None,
    ) -> None:
        self.keeps: Sequence[Stateful] = () if memory is None else (memory,)
        self._memory = memory
        self.modules: Sequence[nn.Module] = (module,)
        self.data_rank, self.data_world = mesh.data_rank, mesh.data_world
        self._mesh, self._settings, self._workload = mesh, settings, workload
        self._run = run
        self._parameters = [each for each in module.parameters() if each.requires_grad]
        self._replica = run if isinstance(run, DistributedDataParallel) else None
        self._shards = module if isinstance(module, FSDPModule) else None
        self._warm = self._replica is None
        self._sent = sent
        self._step_bytes = self._uncounted_bytes()
        self._summed: Callable[[Tensor], Tensor] = context.sum_of_parts(mesh)
        if isinstance(workload, Preferences):  # its loss is not a sum over tokens
            workload.summed, self._summed = self._summed, lambda loss: loss
        self._compiled: Callable[..., Tensor] | None = None
        if settings.compile and mesh.spec.tp == 1:
            self._compiled = torch.compile(workload.loss_sum)

    @property
    def bytes_reduced(self) -> int:
        """Return the bytes of gradients that this rank gave to reductions so far."""
        return self._sent.bytes

    def accumulate(self, parts: Sequence[Inputs], scale: float) -> LossSums:
        """Run all parts forward and backward; see ``Parallel``."""
        with tensor.loss_context(self._mesh):
            if not self._warm:
                self._warm_up(parts[0])
            self._clear()
            # DDP averages over replicas; we want the sum.
            factor = scale * (self.data_world if self._replica is not None else 1)
            sums: list[LossSums] = []
            for number, part in enumerate(parts, start=1):
                with self._synchronised(number == len(parts)):
                    loss = self._loss(self._run, part)
                    torch.autograd.backward(loss * factor)
                sums.append(LossSums(loss.detach(), part.weight))
        if self._shards is None:
            clipping.reduce_pending(self._parameters)
        self._sent.bytes += self._step_bytes
        return LossSums.of(sums)

    def clip(self, max_norm: float, unscale: float = 1.0) -> float:
        """Return the norm of all gradients and clip them; see ``Parallel``."""
        return clipping.clip(self._parameters, self._mesh, max_norm, unscale)

    def evaluate(self, inputs: Inputs) -> LossSums:
        """Return the sums of the loss of this rank's share."""
        (module,) = self.modules
        training = module.training
        module.eval()
        try:
            with torch.no_grad(), tensor.loss_context(self._mesh):
                loss = self._loss(module, inputs)
        finally:
            module.train(training)
            sharded.reshard_all(module)
        return LossSums(loss, inputs.weight)

    def _loss(self, run: nn.Module, part: Inputs) -> Tensor:
        if self._mesh.spec.cp > 1:
            part = context.part_of(part, self._mesh)
        self._require_divisible(part)
        half = contextlib.nullcontext() if self._shards is not None else self._autocast()
        with half:
            outputs = run(*part.args, **part.kwargs)
            if self._compiled is not None:
                return self._summed(self._compiled(outputs, *part.targets))
            loss = tensor.loss_sum(self._workload, self._mesh, outputs, part.targets)
            return self._summed(loss)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        return autocast(self._settings, self._mesh.device_type)

    def _clear(self) -> None:
        for each in self._parameters:
            if self._replica is None:
                each.grad = None
            elif each.grad is not None:
                each.grad.zero_()  # a view into DDP's bucket

    @contextlib.contextmanager
    def _synchronised(self, last: bool) -> Iterator[None]:
        if self._shards is not None:
            self._shards.set_is_last_backward(last)
            self._shards.set_requires_gradient_sync(last)
            self._shards.set_reshard_after_backward(last)
        if last or self._replica is None:
            yield
            return
        with self._replica.no_sync():
            yield

    def _warm_up(self, part: Inputs) -> None:
        """Run one backward pass that changes nothing.

        DDP lays out its buckets anew after the first backward pass. Doing that before the first
        step makes a resumed run add gradients in the same order as an uninterrupted one. Random
        state (dropout) and buffers (batch norm) are restored.
        """
        devices = [torch.cuda.current_device()] if self._mesh.device_type == "cuda" else []
        buffers = [(each, each.clone()) for each in self._run.buffers()]
        with torch.random.fork_rng(devices):
            torch.autograd.backward(self._loss(self._run, part) * 0.0)
        with torch.no_grad():
            for each, before in buffers:
                each.copy_(before)
        self._warm = True
        if self._memory is not None:
            self._memory.buckets_ready()

    def _uncounted_bytes(self) -> int:
        """Return the bytes sent each step where no hook counts them."""
        if self._shards is not None:
            return sharded.reduced_bytes(self.modules[0], self._mesh, self._settings)
        if self._replica is not None and self._settings.mesh.hook == "none":
            return sum(each.numel() * each.element_size() for each in self._parameters)
        return 0

    def _require_divisible(self, part: Inputs) -> None:
        if not isinstance(self.modules[0], Transformer):
            return  # between blocks, sequences are whole
        tp = self._mesh.spec.tp
        if tp > 1 and self._settings.mesh.sequence_parallel and part.args[0].shape[1] % tp:
            raise InvalidInput(
                "tensor parallelism does not divide the sequence",
                got=f"{part.args[0].shape[1]} tokens, tp {tp}",
                wanted=f"a multiple of {tp} tokens",
                do="Change training.mesh.tp, or set training.mesh.sequence_parallel to false.",
            )


def parallelise(
    model: nn.Module,
    mesh: Mesh,
    settings: TrainingSettings,
    workload: Workload,
    *,
    is_frozen: bool = False,
) -> Parallel:
    """Return ``model`` spread over ``mesh`` according to ``settings``; all ranks call it together.

    ``is_frozen``: for ``evaluate`` alone, without buckets for gradients between replicas.
    ``model`` is the whole model, with the same values on every rank, and is consumed. On the meta
    device, the parts get storage without values, to be loaded later. Raises InvalidInput for an
    impossible layout.
    """
    spec = mesh.spec
    if isinstance(model, Transformer):
        require_layout(spec, settings, model.config)
    else:
        require_layout(spec, settings, None)
        if not isinstance(model, HasPlan):
            require_uncut(spec, type(model).__name__)
    model = model.to(master_dtype(settings))
    if not _is_meta(model):
        model = model.to(mesh.device_type)
    part = model
    if spec.pp > 1:
        part = stage_of(model, mesh)
    spread = spec.weight_shards > 1 or (spec.dp > 1 and spec.tp * spec.pp > 1)
    if spec.tp > 1 and isinstance(part, Transformer):
        tensor.cut_matrices(part, mesh, sequence=settings.mesh.sequence_parallel)
    elif spec.tp > 1:
        cut_planned(part, mesh)
    if spec.cp > 1:
        context.cut_attention(part, mesh)
    if settings.compile:
        compile_blocks(part)
    if settings.activation_checkpointing:
        recompute_blocks(part)
    if spread:
        shard(part, mesh, settings)
    elif spec.pp > 1:
        _cast_products(part, mesh, settings)
    if _is_meta(part):
        part.to_empty(device=mesh.device_type)
        if isinstance(part, HasPlan):  # now separate, and the optimizer comes next
            part.tie_weights()
    if spec.pp > 1:
        return Pipelined(part, mesh, settings, workload)
    sent = SentBytes()
    if spec.dp == 1 or spread or is_frozen:
        return SingleStage(model, model, mesh, settings, workload, sent)
    run, memory = replicate(model, mesh, settings.mesh, sent)
    return SingleStage(model, run, mesh, settings, workload, sent, memory)


def _is_meta(model: nn.Module) -> bool:
    return any(each.is_meta for each in model.parameters())


def _cast_products(stage: nn.Module, mesh: Mesh, settings: TrainingSettings) -> None:
    """Run ``stage`` under autocast: a pipeline schedule calls it directly, without
    ``SingleStage``.
    """
    forward = stage.forward

    @functools.wraps(forward)
    def within(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        with autocast(settings, mesh.device_type):
            output: torch.Tensor = forward(*args, **kwargs)
            return output

    stage.forward = within
