"""What a model would take on meshes of described accelerators: before any training of it ran.

The model is a ``config.json`` or a number of parameters; the accelerator is known, or described in
the profile's ``[hardware]``. The figures are those of ``step_model``. Imports no torch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import (
    AcceleratorSettings,
    LinkSettings,
    MeshSettings,
    Profile,
    Runtime,
    TrainingSettings,
    with_job_settings,
)
from paceline.errors import InvalidInput, PacelineError, SourceMissing, short_repr
from paceline.jobs.collectives import GB
from paceline.jobs.cost import estimate, held_energy, held_price, named_kind
from paceline.jobs.step_model import StepModel
from paceline.models import (
    CONFIG_FILE,
    ModelConfig,
    ModelShape,
    config_for,
    config_of,
    json_object,
    read_json,
)
from paceline.schemas import CostEstimate, MeshEstimate, MeshEstimates, SubmitJob
from paceline.storage import join_url
from paceline.training.parallel import (
    MeshSpec,
    replicas_of,
    require_cuttable,
    require_layout,
    require_rows,
)
from paceline.units import size

log = logging.getLogger(__name__)


def _known(memory_gb: float, memory_gb_s: float, bf16: float, f32: float, nvlink_gb_s: float,
           nic_gb_s: float) -> AcceleratorSettings:  # fmt: skip
    """Return an accelerator by its data sheet; shares of it are measured on an H100 or assumed."""
    return AcceleratorSettings(
        tflops={"bfloat16": bf16, "float32": f32},
        achieved=0.546,  # measured: docs/measurements/gpu.md, our loop, compiled, 0.57 G parameters
        memory_gb=memory_gb,
        memory_gb_s=memory_gb_s,
        copy_gb_s=46.0,  # measured: a state of 1.2 GB stops an H100's steps for 26 ms
        per_host=8,
        inside=LinkSettings(latency_us=2.0, gb_s=0.8 * nvlink_gb_s),  # assumed
        between=LinkSettings(latency_us=5.0, gb_s=0.9 * nic_gb_s),  # assumed
        overlap=0.8,  # assumed
    )


KNOWN = {
    "A100": _known(80, 2039, 312, 19.5, 300, 25),
    "H100": _known(80, 3350, 989, 67, 450, 50),
    "H200": _known(141, 4800, 989, 67, 450, 50),
}
MEASURED = "H100"
CONTEXT = 4096  # of models that could read more
MESH = re.compile(r"(dp|shard|cp|tp|pp)([1-9][0-9]{0,6})")
COUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMBT]?)", re.IGNORECASE)


@dataclass(frozen=True)
class DescribedModel:
    """A model of which only the sizes are known; ``config`` is that of one of ours."""

    name: str
    shape: ModelShape
    raw: Mapping[str, Any]
    config: ModelConfig | None

    @classmethod
    def read(cls, given: Path | str, vocabulary: int = 32_768) -> DescribedModel:
        """Return the model in a directory or of a config.json, or one of ours with so many
        parameters ("7B"), ``vocabulary`` tokens and the default context.

        Raises SourceMissing for what is none of these, InvalidInput for families of unknown sizes.
        """
        path = Path(given)
        path = path / CONFIG_FILE if path.is_dir() else path
        if path.is_file():
            return cls.of(read_json(path), str(given), path)
        counted = COUNT.fullmatch(str(given))
        if not counted:
            raise SourceMissing(
                "no model here",
                got=short_repr(str(given)),
                wanted="a model's directory, its config.json, or a number of parameters: 7B",
            )
        factor = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[counted[2].upper()]
        parameters = round(float(counted[1]) * factor)
        parts = 8 if parameters >= 1e9 else 1  # heads that tp can share
        config = config_for(parameters, CONTEXT, vocabulary, parts=parts)
        return cls(f"{given} parameters", ModelShape.of(config), {}, config)

    @classmethod
    def of(cls, raw: Mapping[str, Any], name: str, where: Path | str) -> DescribedModel:
        """Return the model whose ``config.json`` is ``raw``; raises as ``ModelShape.read``."""
        shape = ModelShape.read(raw, where)
        ours = set(raw) <= set(ModelConfig.model_fields)
        return cls(name, shape, raw, config_of(dict(raw), where) if ours else None)

    def require(self, spec: MeshSpec, settings: TrainingSettings, context: int) -> None:
        """Raise InvalidInput where ``spec`` cannot train the model on rows of ``context`` tokens,
        as before ranks start."""
        require_layout(spec, settings, self.config)
        require_rows(spec, settings, context)
        if self.config is None:
            require_cuttable(spec, self.raw)


def accelerator_of(kind: str, hardware: Mapping[str, AcceleratorSettings]) -> AcceleratorSettings:
    """Return what is known of ``kind`` (its name, or a name of which it has the words).

    Raises InvalidInput for a kind that is neither in ``hardware``, the profile's, nor known.
    """
    table = KNOWN | dict(hardware)
    found = named_kind(kind, table)
    if found is None:
        raise InvalidInput(
            "accelerator is not known",
            got=kind,
            wanted=f"one of {', '.join(table)}",
            do=f"Describe it in the profile: [hardware.{kind}].",
        )
    return table[found]


def read_mesh(text: str, base: MeshSettings) -> MeshSettings:
    """Return ``base`` with the axes of ``text``, such as "shard8xtp8"; ``dp``, where it is not
    named, takes the ranks that are left. Raises InvalidInput for other text."""
    parts = [] if text in ("", "dp") else re.split("[x×]", text)
    axes = [MESH.fullmatch(each) for each in parts]
    named = {each[1]: int(each[2]) for each in axes if each}
    if len(named) != len(parts):
        raise InvalidInput(
            "not a mesh", got=short_repr(text), wanted="axes and ranks: shard8xtp8, dp16xpp4, dp"
        )
    return base.model_copy(update={"dp": 0, "shard": 1, "cp": 1, "tp": 1, "pp": 1} | named)


def usual_meshes(ranks: int, per_host: int) -> Iterator[str]:
    """Return meshes to compare on ``ranks`` ranks; some may be impossible for a model."""
    host = min(ranks, per_host)
    hosts = ranks // host
    yield from ("dp", f"shard{ranks}", f"shard{host}")
    yield f"shard{hosts}xtp{host}" if hosts > 1 else f"tp{host}"
    if hosts > 1:
        yield f"tp{host}xpp{min(4, hosts)}"
    yield f"pp{min(4, host)}"


def estimate_meshes(
    model: DescribedModel,
    kind: str,
    profile: Profile,
    *,
    ranks: Sequence[int] = (8, 64, 512),
    meshes: Sequence[str] = (),
    context: int | None = None,
    rank_sequences: int = 4,
    batch_sequences: int | None = None,
    precision: str | None = None,
    tokens: float | None = None,
) -> MeshEstimates:
    """Return what trainings of ``model`` would take on accelerators of ``kind``.

    A step has ``batch_sequences`` rows of ``context`` tokens (default: 4,096 or what the model can
    read), or ``rank_sequences`` for each rank. ``precision`` is by default the accelerator's first.
    ``tokens`` are of the whole training: hours, energy and price. Without ``meshes`` the usual ones
    that the model allows. All else is that of ``profile``.

    Raises InvalidInput for an unknown accelerator, a mesh that does not give the ranks or cannot
    train the model, and where the model fits on no mesh.
    """
    accelerator = accelerator_of(kind, profile.hardware)
    if context is not None and not 2 <= context <= model.shape.context:
        raise InvalidInput(
            "context does not suit the model", got=context, wanted=f"2 to {model.shape.context}"
        )
    context = context or min(CONTEXT, model.shape.context)
    chosen = precision or next(iter(accelerator.tflops))
    rows: list[MeshEstimate] = []
    for count in ranks:
        batch = batch_sequences or rank_sequences * count
        settings = profile.training.model_copy(
            update={"ranks": count, "batch_sequences": batch, "precision": chosen}
        )
        made: dict[MeshSpec, MeshEstimate] = {}
        for text in meshes or usual_meshes(count, accelerator.per_host):
            mesh = read_mesh(text, settings.mesh)
            its = settings.model_copy(update={"mesh": mesh})
            try:
                spec = MeshSpec.of(mesh, count)
                model.require(spec, its, context)
            except InvalidInput:
                if meshes:
                    raise
                continue  # the model, or the batch, does not allow this one of the usual meshes
            if spec not in made:
                step = StepModel(model.shape, spec, its, context, accelerator)
                made[spec] = _row(step, kind, profile, tokens)
        rows += sorted(made.values(), key=lambda each: (not each.fits, -each.tokens_per_second))
    _require_one_that_fits(rows, accelerator, kind)
    return MeshEstimates(
        model=model.name,
        parameters=model.shape.parameters,
        accelerator=kind,
        memory_gb=accelerator.memory_gb,
        precision=chosen,
        context=context,
        tokens=tokens,
        currency=profile.prices.currency,
        rows=tuple(rows),
        based_on=tuple(_basis(kind, accelerator, profile, chosen)),
    )


def _require_one_that_fits(
    rows: Sequence[MeshEstimate], accelerator: AcceleratorSettings, kind: str
) -> None:
    if any(each.fits for each in rows):
        return
    least = min((each.memory_bytes for each in rows), default=0.0)
    raise InvalidInput(
        "the model fits on no rank of these meshes",
        got=f"{size(least)} a rank at least" if rows else "no mesh that can train it",
        wanted=f"at most {accelerator.memory_gb:g} GB, {kind}'s",
        do="Use more ranks, shard, cp, tp or pp, fewer rows, or training.activation_checkpointing.",
    )


def _row(step: StepModel, kind: str, profile: Profile, tokens: float | None) -> MeshEstimate:
    total = sum(step.memory.values())
    speed = step.tokens / step.step_s * (1 - step.checkpoint_share)
    held = {kind: step.spec.world_size}
    seconds = None if tokens is None else tokens / speed
    return MeshEstimate(
        mesh=str(step.spec),
        ranks=step.spec.world_size,
        batch_sequences=step.settings.batch_sequences,
        step_s=step.step_s,
        seconds=step.seconds,
        checkpoint_share=step.checkpoint_share,
        tokens_per_second=speed,
        efficiency=step.efficiency,
        mfu=step.mfu,
        memory=step.memory,
        memory_bytes=total,
        fits=total <= step.accelerator.memory_gb * GB,
        hours=None if seconds is None else seconds / 3600,
        energy_kwh=None if seconds is None else held_energy(held, seconds, profile.prices),
        price=None if seconds is None else held_price(held, seconds, profile.prices),
    )


def _basis(
    kind: str, accelerator: AcceleratorSettings, profile: Profile, precision: str
) -> Iterator[str]:
    peaks = {str(name): each for name, each in accelerator.tflops.items()}
    peak = peaks.get(precision) or peaks["bfloat16"]  # float16 has the same
    reached = f"products at {peak * accelerator.achieved:.4g} TFLOP/s"
    near, far = accelerator.inside, accelerator.between
    links = f"links of {near.gb_s:g} GB/s in a host and {far.gb_s:g} GB/s between hosts"
    if named_kind(kind, profile.hardware):
        yield f"{reached}, {links}: [hardware] of the profile"
    else:
        on = "measured" if named_kind(kind, [MEASURED]) else f"assumed as {MEASURED}'s"
        slower = "" if profile.training.compile else "; not compiled, as here, steps are slower"
        yield f"{reached}: the share is {on} with one compiled model of 0.57 B{slower}"
        yield f"{links}: shares of the data sheets, not measured"
    yield "not counted: waiting for data, failures, stragglers, what the allocator keeps"


def estimate_submitted(
    spec: SubmitJob, kinds: Collection[str], runtime: Runtime
) -> CostEstimate | None:
    """Return what the job ``spec`` would take by the model of a step, where no earlier training
    gives its speed; ``kinds`` are the fleet's accelerators.

    None where the job may run on several kinds, and where its kind, model or mesh is not known
    here: the job runs without an estimate, and the reason is logged.
    """
    asked = spec.resources.accelerator
    fitting = {each for each in kinds if asked.lower() in each.lower()} or {asked}
    profile = with_job_settings(runtime.profile, spec.settings)
    if len(fitting) != 1 or spec.code_ref or profile.training.code_ref:
        return None
    from paceline.storage import ObjectStore

    where = join_url(runtime.models_url, spec.model_id, spec.version, CONFIG_FILE)
    kind = fitting.pop()
    try:
        accelerator_of(kind, profile.hardware)  # before anything is read
        raw = json_object(ObjectStore.from_runtime(runtime).get_bytes(where), where)
        return estimate_by_model(raw, profile, kind, spec.resources.capacity)
    except PacelineError as error:
        log.info("no estimate of a job: %s", error.one_line())
        return None


def estimate_by_model(
    raw: Mapping[str, Any], profile: Profile, kind: str, capacity: str = ""
) -> CostEstimate:
    """Return what ``profile``'s training of the model with the config.json ``raw`` would take by
    the model of a step. Raises InvalidInput for an unknown kind, family or mesh."""
    settings = profile.training
    model = DescribedModel.of(raw, "", CONFIG_FILE)
    spec = MeshSpec.of(settings.mesh, replicas_of(settings))
    context = model.shape.context if model.config else profile.model.context
    step = StepModel(model.shape, spec, settings, context, accelerator_of(kind, profile.hardware))
    return estimate(
        profile.prices,
        steps=settings.steps,
        tokens_per_step=step.tokens,
        tokens_per_second=step.tokens / step.step_s * (1 - step.checkpoint_share),
        accelerators={kind: settings.ranks + settings.guard.spares},
        capacity=capacity,
        basis=f"by the model of a step on mesh {spec}, as no training like it is recorded",
    )
