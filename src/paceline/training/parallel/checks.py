"""Validation of a mesh and of a strategy's layout before ranks start: arithmetic, no torch.

A driver calls ``require_layout`` with the mesh that it is about to start; each rank repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from paceline.config import DataSettings, MeshSettings, TrainingSettings
from paceline.errors import InvalidInput
from paceline.models import BY_LENGTH, ModelConfig
from paceline.training.parallel.mesh import MeshSpec

SERVING = 2  # ranks of a parameter server that compute no gradients: it and its standby


def is_asynchronous(settings: TrainingSettings) -> bool:
    """Return whether ranks may fail independently: one failure does not end the gang."""
    return settings.synchrony.kind == "parameter-server"


def require_ranks(settings: TrainingSettings, ranks: int) -> int:
    """Return the number of workers; raises InvalidInput for a layout without a server."""
    if ranks < SERVING + 1:
        raise InvalidInput(
            "too few ranks for a parameter server",
            got=f"{ranks} ranks",
            wanted="a server, a standby and a worker at least: 3",
            do="Raise training.ranks, or change training.synchrony.kind.",
        )
    mesh = settings.mesh
    if mesh.ranks_per_replica > 1 or mesh.hook != "none":
        raise InvalidInput(
            "a parameter server serves whole replicas",
            got=f"shard {mesh.shard}, tp {mesh.tp}, pp {mesh.pp}, cp {mesh.cp}, hook {mesh.hook}",
            wanted="1, 1, 1, 1 and none",
        )
    if settings.precision == "float16":
        raise InvalidInput(
            "a parameter server scales no losses", got="float16", wanted="bfloat16 or float32"
        )
    workers = ranks - SERVING
    if mesh.dp not in (0, workers):
        raise InvalidInput(
            "mesh does not fit the workers of a parameter server",
            got=f"dp {mesh.dp}, {ranks} ranks",
            wanted=f"dp 0 or {workers}: server and standby have no share of a batch",
        )
    return workers


def replicas_of(settings: TrainingSettings) -> int:
    """Return the number of ranks that have a share of each batch."""
    if is_asynchronous(settings):
        return require_ranks(settings, settings.ranks)
    return settings.ranks


BUCKET_TOKENS = 8  # rows of length buckets and of pairs are padded to a multiple of it
DROPOUTS = ("attention_dropout", "hidden_dropout")  # of the families' config.json


def require_layout(
    spec: MeshSpec,
    settings: TrainingSettings,
    config: ModelConfig | None,
    data: DataSettings | None = None,
) -> None:
    """Raise InvalidInput unless ``spec`` can train a model of ``config`` with these settings.

    ``config`` is None for a user's own model (``code_ref``), or where it has not been read yet:
    then only the rules for every model are checked.
    """
    if settings.batch_sequences < spec.data_world:
        raise _refused(
            "batch is smaller than the data ranks",
            got=f"{settings.batch_sequences} sequences, dp {spec.dp} x shard {spec.shard}",
            wanted=f"at least {spec.data_world} sequences",
            do="Raise training.batch_sequences, or use fewer replicas.",
        )
    _require_hook(spec, settings)
    if settings.optimizer == "muon" and spec.pp > 1:
        raise _refused(
            "muon does not train the stages of a pipeline",
            got=f"mesh {spec}",
            wanted="pp 1",
            do="Use shard or tp instead of pp, or training.optimizer adamw.",
        )
    if settings.code_ref:
        require_uncut(spec, settings.code_ref)
    _require_adaptable(spec, settings, config)
    if spec.cp > 1:
        _require_row_parts(spec, settings)
    if config is not None and spec.cp > 1:
        _require_heads(spec, config.model_dump())
        require_rows(spec, settings, config.context, data)
    if config is not None and spec.tp > 1:
        _require_tensor(spec, settings, config, data)
    if config is not None and spec.pp > 1:
        _require_layers(spec, config.num_hidden_layers)
    count = microbatches_of(spec, settings)
    if settings.mesh.schedule == "1f1b" and count < spec.pp:
        raise _refused(
            "fewer microbatches than stages",
            got=f"{count} microbatches, pp {spec.pp}",
            wanted=f"at least {spec.pp}",
            do="Raise training.mesh.microbatches, or use the schedule gpipe.",
        )


def require_uncut(spec: MeshSpec, model: str) -> None:
    """Raise InvalidInput where ``spec`` would cut ``model``, a user's own."""
    if spec.tp * spec.pp * spec.cp > 1:
        raise _refused(
            "a model of your own is not cut by matrices, into stages or by rows",
            got=f"mesh {spec}, model {model}",
            wanted="tp 1, pp 1 and cp 1",
            do="Use shard instead of tp, pp and cp for a model of your own.",
        )


def require_rows(
    spec: MeshSpec, settings: TrainingSettings, context: int, data: DataSettings | None = None
) -> None:
    """Raise InvalidInput where ``cp`` does not divide rows of ``context`` tokens; in length buckets
    and of pairs of answers, rows are shorter."""
    lengths = {"context": context}
    if settings.dpo is not None:
        lengths["widths of pairs"] = BUCKET_TOKENS
    elif data is not None and data.batching == "bucketed":
        lengths["length buckets"] = BUCKET_TOKENS
    _require_divisible("cp", spec.cp, lengths)


def require_cuttable(spec: MeshSpec, config: Mapping[str, Any]) -> None:
    """Raise InvalidInput where ``spec`` cannot cut a model of transformers with this config.json.

    Whether the family has a plan is known to ``require_planned``, which needs torch.
    """
    if spec.pp > 1 and isinstance(layers := config.get("num_hidden_layers"), int):
        _require_layers(spec, layers)
    if spec.cp * spec.pp > 1:
        _require_fixed(spec, config)
    if spec.cp > 1:
        _require_heads(spec, config)
    if spec.tp == 1:
        return
    _require_divisible("tp", spec.tp, _sizes(config))
    if dropout := config.get("attention_dropout"):
        raise _refused(
            "ranks of one tp would drop the same places of different heads",
            got=f"attention_dropout {dropout}, tp {spec.tp}",
            wanted="attention_dropout 0, or tp 1",
            do="Change config.json of the model, or use training.mesh.shard instead of tp.",
        )


def data_shares_of(settings: TrainingSettings) -> int:
    """Return the number of shares of a global batch in the whole gang, each on its own node."""
    return MeshSpec.of(settings.mesh, replicas_of(settings)).data_world


def cuts_of(mesh: MeshSettings) -> dict[str, Any]:
    """Return ``parts`` of the matrices and ``stages`` of the layers: arguments of ``config_for``,
    which gives a new model a suitable shape."""
    return {"parts": mesh.tp * mesh.cp, "stages": mesh.pp}


def microbatches_of(spec: MeshSpec, settings: TrainingSettings) -> int:
    """Return the number of microbatches of one part of a batch in a pipeline."""
    return settings.mesh.microbatches or 2 * spec.pp


def layers_of(stage: int, stages: int, layers: int) -> range:
    """Return the blocks of ``stage``; where they do not divide evenly, the outer stages get fewer.

    The first and last stage also have the embedding and the head.
    """
    least, more = divmod(layers, stages)
    spare = (stages - more) // 2  # stages before those with one block more
    extra = range(spare, spare + more)
    start = sum(least + (each in extra) for each in range(stage))
    return range(start, start + least + (stage in extra))


def _require_adaptable(
    spec: MeshSpec, settings: TrainingSettings, config: ModelConfig | None
) -> None:
    in_step, lora = settings.synchrony.kind == "every-step", settings.lora
    if settings.dpo is not None and (spec.tp * spec.pp > 1 or not in_step):
        raise InvalidInput(
            "preferences are learned by replicas or shards, in step",
            got=f"mesh {spec}, {settings.synchrony.kind}",
            wanted="tp 1, pp 1 and every-step",
            where="training.dpo",
        )
    if settings.code_ref and settings.dpo is not None:
        raise InvalidInput(
            "a model of your own has its own loss",
            got=f"training.code_ref {settings.code_ref}",
            wanted="one of them",
            where="training.dpo",
        )
    if lora is None:
        return
    if spec.pp > 1 or (spec.tp > 1 and config is not None) or not in_step:
        raise InvalidInput(
            "adapters are trained by replicas or shards, in step",
            got=f"mesh {spec}, {settings.synchrony.kind}",
            wanted="pp 1 and every-step; tp 1 but for models of transformers",
            where="training.lora",
        )
    if spec.tp > 1 and (lora.use_dora or lora.lora_dropout):
        raise InvalidInput(
            "DoRA and dropout of adapters need whole matrices",
            got=f"tp {spec.tp}, use_dora {lora.use_dora}, lora_dropout {lora.lora_dropout}",
            wanted="tp 1, or LoRA without dropout",
            where="training.lora",
        )
    if settings.code_ref and not lora.target_modules:
        raise InvalidInput(
            "a model of your own has no default layers to adapt",
            got=f"training.code_ref {settings.code_ref}, no targets",
            wanted="names of its linear layers, or all-linear",
            where="training.lora.target_modules",
        )


def _require_hook(spec: MeshSpec, settings: TrainingSettings) -> None:
    if settings.mesh.hook != "none" and spec.weight_shards * spec.tp * spec.pp > 1:
        raise _refused(
            "a hook compresses gradients between whole replicas only",
            got=f"hook {settings.mesh.hook}, mesh {spec}",
            wanted="shard, cp, tp and pp of 1",
            do="Use training.mesh.hook none, or replicas alone.",
        )


def _require_tensor(
    spec: MeshSpec,
    settings: TrainingSettings,
    config: ModelConfig,
    data: DataSettings | None,
) -> None:
    parts = _sizes(config.model_dump())
    if settings.mesh.sequence_parallel:
        parts["context"] = config.context // spec.cp
        if data is not None and data.batching == "bucketed":
            parts["length buckets"] = BUCKET_TOKENS // spec.cp
    _require_divisible("tp", spec.tp, parts)


def _require_row_parts(spec: MeshSpec, settings: TrainingSettings) -> None:
    lora = settings.lora
    odd = {
        f"pp {spec.pp}": spec.pp > 1,
        settings.synchrony.kind: settings.synchrony.kind != "every-step",
        "lora_dropout": lora is not None and lora.lora_dropout > 0,
    }
    if any(odd.values()):
        raise _refused(
            "parts of rows are trained in step, without stages and without dropout",
            got=f"cp {spec.cp}, {', '.join(name for name, is_odd in odd.items() if is_odd)}",
            wanted="pp 1, every-step and training.lora.lora_dropout 0",
            do="Use training.mesh.cp 1, or without these.",
        )


def _require_fixed(spec: MeshSpec, config: Mapping[str, Any]) -> None:
    """Raise InvalidInput where parts of rows, or microbatches, would not give what a whole batch
    does: frequencies that follow the length of what is computed, and dropout (ranks of a row would
    drop the same; stages draw anew after a resume, in a trial run)."""
    rope = repr(config.get("rope_parameters") or config.get("rope_scaling"))
    odd = [f"rope_type {name}" for name in BY_LENGTH if repr(name) in rope]
    odd += [f"{name} {each}" for name in DROPOUTS if (each := config.get(name))]
    axes = {"cp": spec.cp, "pp": spec.pp}
    if odd:
        raise _refused(
            "the model needs whole batches on each rank",
            got=", ".join([*odd, *(f"{name} {n}" for name, n in axes.items() if n > 1)]),
            wanted=f"no dropout, and no rope_type of {', '.join(BY_LENGTH)}; or cp 1 and pp 1",
            do="Use training.mesh.shard instead of training.mesh.cp and training.mesh.pp.",
        )


def _require_heads(spec: MeshSpec, config: Mapping[str, Any]) -> None:
    """Raise InvalidInput unless ``cp`` divides the heads that ``tp`` leaves a rank."""
    sizes = _sizes(config)
    heads = [size // spec.tp for name, size in sizes.items() if name.endswith("heads")]
    if (most := math.gcd(*heads)) % spec.cp:
        shown = ", ".join(f"{name} {n}" for name, n in sizes.items() if name.endswith("heads"))
        raise _refused(
            "context parallelism does not divide the heads",
            got=f"{shown}, cp {spec.cp}" + (f", tp {spec.tp}" if spec.tp > 1 else ""),
            wanted=f"a cp that divides {most}, at most {most}",
            do="Change training.mesh.cp, or use training.mesh.shard for the other ranks.",
        )


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes that ``tp`` must divide, of a config.json."""
    keys = {
        "query heads": "num_attention_heads",
        "key-value heads": "num_key_value_heads",  # GPT-NeoX has none: as many as query heads
        "feed-forward width": "intermediate_size",
        "vocabulary": "vocab_size",
    }
    found = {name: config.get(key) for name, key in keys.items()}
    return {name: size for name, size in found.items() if isinstance(size, int)}


def _require_divisible(axis: str, parts: int, sizes: Mapping[str, int]) -> None:
    kind = {"tp": "tensor", "cp": "context"}[axis]
    for name, size in sizes.items():
        if size % parts:
            raise _refused(
                f"{kind} parallelism does not divide the {name}",
                got=f"{name} {size}, {axis} {parts}",
                wanted=f"a {axis} that divides {size}",
                do=f"Change training.mesh.{axis}, or the model's shape.",
            )


def _require_layers(spec: MeshSpec, layers: int) -> None:
    if layers < spec.pp:
        raise _refused(
            "more stages than layers",
            got=f"{layers} layers, pp {spec.pp}",
            wanted=f"at least {spec.pp} layers",
            do="Use a smaller training.mesh.pp, or a deeper model.",
        )


def _refused(what: str, *, got: str, wanted: str, do: str) -> InvalidInput:
    return InvalidInput(what, got=got, wanted=wanted, where="training.mesh", do=do)
