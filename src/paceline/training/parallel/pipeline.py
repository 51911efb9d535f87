"""Pipeline parallelism: groups of layers on different ranks (GPipe, 1F1B).

torch.distributed.pipelining runs the schedule; this module cuts the model, feeds microbatches of
equal size, and adds up the two gradients of an embedding that the first and last stage share.
Sources: GPipe (arXiv 1811.06965), 1F1B (1806.03377).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.config import TrainingSettings
from paceline.models import Transformer, cut_stage
from paceline.training.checkpoint import local_of
from paceline.training.loop import Inputs, LossSums, Workload
from paceline.training.parallel import clipping, sharded, tensor
from paceline.training.parallel.checks import layers_of, microbatches_of
from paceline.training.parallel.mesh import Mesh

SCHEDULES_KEPT = 8  # batch shapes with a cached schedule; each new one costs a trial run


def stage_of(model: Any, mesh: Mesh) -> Any:
    """Return this rank's stage of ``model``, ours or of transformers, and consume the model: a
    reference to it keeps no other rank's layers."""
    layers = layers_of(mesh.stage, mesh.spec.pp, model.config.num_hidden_layers)
    ends = {"embedding": mesh.first_stage, "head": mesh.last_stage}
    if not isinstance(model, Transformer):
        cut_stage(model, layers, **ends)
        return model
    part = model.stage(layers, **ends)
    for name in [name for name, _ in model.named_children()]:
        delattr(model, name)
    return part


class Pipelined:
    """A ``Parallel`` whose rank runs one stage; all parts of a batch form one schedule."""

    def __init__(
        self, part: Any, mesh: Mesh, settings: TrainingSettings, workload: Workload
    ) -> None:
        self.modules: Sequence[nn.Module] = (part,)
        self.data_rank, self.data_world = mesh.data_rank, mesh.data_world
        self.bytes_reduced = 0
        self._mesh, self._settings, self._workload = mesh, settings, workload
        self._config = part.config
        self._parameters = list(part.parameters())
        self._is_sharded = any(True for _ in sharded.sharded_parts(part))
        self._schedules: dict[tuple[object, ...], Any] = {}
        self._targets: tuple[Tensor, ...] = ()
        self._rows = self._rows_each = 0
        self._scale = 1.0
        self._losses: dict[int, Tensor] = {}
        self._tied = self._find_tied()

    def accumulate(self, parts: Sequence[Inputs], scale: float) -> LossSums:
        """Run all parts forward and backward; see ``Parallel``."""
        for each in self._parameters:
            each.grad = None
        loss = self._run(parts, scale, train=True)
        clipping.reduce_pending(self._parameters)
        self._add_tied()
        if self._is_sharded:
            self.bytes_reduced += sharded.reduced_bytes(self.modules[0], self._mesh, self._settings)
        return self._sums(loss, parts)

    def clip(self, max_norm: float, unscale: float = 1.0) -> float:
        """Return the norm of all gradients and clip them; see ``Parallel``."""
        twice = self._tied if self._mesh.last_stage else None
        skipped = frozenset() if twice is None else frozenset({id(twice)})
        return clipping.clip(self._parameters, self._mesh, max_norm, unscale, skipped)

    def evaluate(self, inputs: Inputs) -> LossSums:
        """Return the sums of the loss of this rank's share."""
        (module,) = self.modules
        was_training = module.training
        module.eval()
        try:
            with torch.no_grad():
                loss = self._run([inputs], 1.0, train=False)
        finally:
            module.train(was_training)
            sharded.reshard_all(module)
        return self._sums(loss, [inputs])

    def _run(self, parts: Sequence[Inputs], scale: float, *, train: bool) -> Tensor:
        """Run the schedule and return the loss, zero on ranks that do not compute it."""
        args = _joined([part.args for part in parts])
        names = list(parts[0].kwargs)
        values = _joined([tuple(part.kwargs[name] for name in names) for part in parts])
        self._targets = _joined([part.targets for part in parts])
        self._rows = len(args[0])
        count = microbatches_of(self._mesh.spec, self._settings) * len(parts)
        self._rows_each = -(-self._most_rows() // count)
        self._scale = scale
        self._losses = {}
        wanted = count * self._rows_each
        args = tuple(_padded(each, wanted) for each in args)
        kwargs = {name: _padded(value, wanted) for name, value in zip(names, values, strict=True)}
        schedule = self._schedule(count, args[0].shape, tuple(names), train)
        call = schedule.step if train else schedule.eval
        with tensor.loss_context(self._mesh):
            call(
                *(args if self._mesh.first_stage else ()),
                target=torch.arange(count),
                return_outputs=False,
                **kwargs,
            )
        if not self._mesh.last_stage:
            return torch.zeros((), device=args[0].device)
        assert len(self._losses) == count, "the last stage sees every microbatch"
        return torch.stack([self._losses[number] for number in range(count)]).sum()

    def _most_rows(self) -> int:
        """Return the most rows of any share: shapes must be the same on all data ranks.

        A new shape costs a trial pass, which gathers shards, so all ranks must run it together.
        """
        if self.data_world == 1:
            return self._rows
        rows = torch.tensor(self._rows)
        dist.all_reduce(rows, dist.ReduceOp.MAX)
        return int(rows)

    def _schedule(self, count: int, shape: torch.Size, names: tuple[str, ...], train: bool) -> Any:
        key = (count, tuple(shape), names, train)
        found = self._schedules.pop(key, None)
        if found is None:
            found = self._new_schedule(count)
            while len(self._schedules) >= SCHEDULES_KEPT:
                del self._schedules[next(iter(self._schedules))]
        self._schedules[key] = found  # newest last
        return found

    def _new_schedule(self, count: int) -> Any:
        mesh = self._mesh
        # Late: it imports torch's compiler, 0.6 s of CPU that ranks without stages do not need.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        stage = PipelineStage(
            self.modules[0],
            mesh.stage,
            mesh.spec.pp,
            torch.device(mesh.device_type),
            group=mesh.group("pp"),
        )
        schedule = ScheduleGPipe if self._settings.mesh.schedule == "gpipe" else Schedule1F1B
        return schedule(stage, count, loss_fn=self._loss, scale_grads=False)

    def _loss(self, outputs: Tensor, index: Tensor) -> Tensor:
        """Return the loss of microbatch ``index``, whose last rows may be padding."""
        number = int(index)
        start = number * self._rows_each
        rows = max(0, min(self._rows_each, self._rows - start))
        # A microbatch of padding alone still takes part in the schedule, with row 0's targets.
        taken = slice(start, start + rows) if rows else slice(0, 1)
        targets = tuple(each[taken] for each in self._targets)
        loss = tensor.loss_sum(self._workload, self._mesh, outputs[: max(1, rows)], targets)
        if not rows:
            loss = loss * 0.0
        self._losses[number] = loss.detach()
        return loss * self._scale

    def _sums(self, loss: Tensor, parts: Sequence[Inputs]) -> LossSums:
        weight = sum(part.weight for part in parts) if self._mesh.last_stage else 0.0
        return LossSums(loss, weight)

    def _find_tied(self) -> nn.Parameter | None:
        """Return this rank's copy of an embedding that the first and last stage share."""
        ends = self._mesh.first_stage or self._mesh.last_stage
        if not ends or not self._config.tie_word_embeddings:
            return None
        part: Any = self.modules[0]
        ours = isinstance(part, Transformer)
        embedding = part.model.embed_tokens if ours else part.get_input_embeddings()
        found: nn.Parameter = embedding.weight
        return found

    def _add_tied(self) -> None:
        """Add both ends' gradients of the tied embedding: a + b = b + a, so both stay equal."""
        if self._tied is None:
            return
        assert self._tied.grad is not None
        mine = local_of(self._tied.grad)
        theirs = torch.empty_like(mine)
        group = self._mesh.group("pp")
        peer = self._mesh.spec.pp - 1 if self._mesh.first_stage else 0
        operations = [
            dist.P2POp(dist.isend, mine.contiguous(), group=group, group_peer=peer),
            dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        mine.add_(theirs)


def _joined(rows: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    if len(rows) == 1:
        return rows[0]
    return tuple(torch.cat(each) for each in zip(*rows, strict=True))


def _padded(rows: Tensor, wanted: int) -> Tensor:
    """Return ``rows`` with row 0 repeated at the end, up to ``wanted`` rows."""
    missing = wanted - len(rows)
    if not missing:
        return rows
    return torch.cat([rows, rows[:1].expand(missing, *rows.shape[1:])])
