"""What a rank exports: the trained model, its adapters and its card, whole from every layout.

Which state is exported follows from ``EarlyStopping`` (the best one) or is the last one. Nothing
here decides when training ends.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.data import template_config, tokenizer_file
from paceline.models import (
    CARD_FILE,
    CONFIG_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    Transformer,
    UserCodeConfig,
    card_text,
    exported,
    merge_adapters,
    read_card,
    weights_digest,
    write_program,
)
from paceline.storage import join_url
from paceline.system import write_durably
from paceline.training.checkpoint import TrainState, export, restore_best
from paceline.training.identity import code_version, export_directory
from paceline.training.loop.loop import Progress, is_evaluation_step
from paceline.training.loop.starting_state import RankContext
from paceline.training.loop.step_guard import EarlyStopping
from paceline.training.user_code import task_of
from paceline.units import counted

ADAPTER = "adapter"  # directory beside the export
BASE_CARD = "base-README.md"  # in the state directory of a training on one machine; may be empty


def export_trained(
    rank_context: RankContext,
    state: TrainState,
    progress: Progress,
    rank: int,
    averaged: Callable[[], contextlib.AbstractContextManager[object]],
) -> dict[str, Any]:
    """Do what ``export_model`` does with the ``averaged`` weights of the last step or, where early
    stopping ended the training and the best evaluated checkpoint is kept, of that one.

    Its step is added as ``exported_step``, else None; ``progress`` gets its evaluation.
    """
    best = _restore_best(rank_context, state, progress)
    with averaged():
        found = export_model(rank_context, state, rank, progress.step if best is None else best)
    return found | {"exported_step": best}


def _restore_best(rank_context: RankContext, state: TrainState, progress: Progress) -> int | None:
    """Return the step of the checkpoint that is restored; None where ``state`` is unchanged."""
    best = EarlyStopping.best_of(progress)
    if best is None:
        return None
    restored = restore_best(
        rank_context.generations,
        state,
        config_digest=rank_context.config_digest,
        work_dir=rank_context.work_dir,
        evaluated=lambda step: is_evaluation_step(step, rank_context.job.settings),
        best=best,
    )
    if restored is None:
        return None
    progress.held_out = Progress.at(restored.step, restored.metrics).held_out
    return restored.step


def export_model(
    rank_context: RankContext, state: TrainState, rank: int, steps: int
) -> dict[str, Any]:
    """Export and upload the whole model with its card (a collective call); return URL and digest
    on rank 0, {} elsewhere."""
    directory = rank_context.work_dir / "export"
    shutil.rmtree(directory, ignore_errors=True)
    named = rank_context.job.settings.export_dtype
    dtype = None if named == "base" else getattr(torch, named)
    adapters, whole = _merged(rank_context, state), replace(state, without_frozen=False)
    export(
        whole,
        rank_context.config,
        directory,
        pretrained=rank_context.pretrained,
        dtype=dtype,
        file_bytes=rank_context.job.settings.export_file_bytes,
    )
    if rank != 0:
        return {}
    if rank_context.job.settings.code_ref:
        write_durably(directory / CONFIG_FILE, _user_code_config(rank_context), 0o666)
    if rank_context.pretrained is None and (
        file := tokenizer_file(rank_context.snapshot, rank_context.store)
    ):
        write_durably(directory / TOKENIZER_FILE, file, 0o666)
        if rank_context.snapshot.is_masked and (
            config := template_config(rank_context.snapshot, rank_context.store)
        ):
            write_durably(directory / TOKENIZER_CONFIG_FILE, config, 0o666)
    program = {}
    if rank_context.job.settings.export_program:
        program = {"program": write_program(directory).model_dump()}
    job = rank_context.job
    url = join_url(job.checkpoint_url, job.job_id, export_directory(job.settings))
    digest = weights_digest(directory)
    card = _card(rank_context, steps, digest).encode()
    write_durably(directory / CARD_FILE, card, 0o666)
    if rank_context.adapters is not None:
        _upload_adapters(rank_context, adapters, card)
    for path in sorted(directory.iterdir()):
        rank_context.store.upload_file(path, join_url(url, path.name))
    shutil.rmtree(directory, ignore_errors=True)
    return {"export_url": url, "weights_digest": digest, **program}


def _card(rank_context: RankContext, steps: int, digest: str) -> str:
    """Return the card of the export; it does not follow from the layout of the ranks."""
    from paceline.manifest import directory_name

    job, code_ref = rank_context.job, rank_context.job.settings.code_ref
    beside = rank_context.runtime.state_dir / BASE_CARD
    is_alone = beside.exists()  # then the base has no name
    base = f"manifest `{job.manifest_digest}`"
    held = rank_context.node / "store/models" / directory_name(job.model_id) / job.version
    rows = {
        "model": f"`{code_ref}`",
        "base model": base if is_alone else f"{job.model_id} {job.version}, {base}",
        "data": rank_context.snapshot.in_words,
        "job": f"`{job.job_id}`, {counted(steps, 'step')}",
        "configuration": f"`{rank_context.config_digest}`",
        "code": f"`{code_version()}`",
        "weights": f"`{digest}`",
    }
    del rows["base model" if code_ref else "model"]
    where = ("OUTPUT", "With the directory that was its `--output`:")
    title = f"{job.model_id}, trained from version {job.version}"
    return card_text(
        "Trained on one machine" if is_alone else title,
        rows,
        ["Not judged."],
        *(where if is_alone else (job.job_id,)),
        base_card=read_card(held / CARD_FILE, beside),
        base_model="" if is_alone else job.model_id,
        is_pretrained=rank_context.pretrained is not None,
    )


def require_exportable(rank_context: RankContext) -> None:
    """Raise InvalidInput where the job asks for a program that its model does not have."""
    if rank_context.job.settings.export_program:
        if rank_context.pretrained is not None:
            exported(rank_context.pretrained.build(), rank_context.pretrained.longest_context)
        elif rank_context.config is not None:
            with torch.device("meta"):
                exported(Transformer(rank_context.config), rank_context.config.context)


def _user_code_config(rank_context: RankContext) -> bytes:
    vocabulary = rank_context.snapshot.vocabulary
    task = task_of(rank_context.job, rank_context.runtime.profile, vocabulary.vocab_size)
    config = UserCodeConfig(
        code_ref=rank_context.job.settings.code_ref,
        seed=task.seed,
        parameters=task.parameters,
        max_position_embeddings=task.context,
        vocab_size=task.vocabulary,
        bos_token_id=vocabulary.separator,
        tokenizer_digest=vocabulary.sha256 or "",
    )
    return f"{config.model_dump_json(indent=2)}\n".encode()


def _merged(rank_context: RankContext, state: TrainState) -> dict[str, Tensor]:
    """Merge the adapters, if any, into the model; return them whole, on every rank."""
    if rank_context.adapters is None:
        return {}
    whole = {
        name: each.full_tensor() if isinstance(each, DTensor) else each
        for name, each in state.parameters()
        if name in rank_context.adapters.initial
    }
    for module in state.modules:
        merge_adapters(module)
    return {name: each.detach().cpu() for name, each in whole.items()}


def _upload_adapters(rank_context: RankContext, tensors: Mapping[str, Tensor], card: bytes) -> None:
    """Upload the trained adapters in peft's layout with the export's card, beside the export."""
    assert rank_context.adapters is not None
    directory, job = rank_context.work_dir / ADAPTER, rank_context.job
    directory.mkdir(exist_ok=True)
    rank_context.adapters.write(tensors, directory, job.model_id, job.manifest_digest)
    write_durably(directory / CARD_FILE, card, 0o666)
    for path in sorted(directory.iterdir()):
        url = join_url(job.checkpoint_url, job.job_id, ADAPTER, path.name)
        rank_context.store.upload_file(path, url)
    shutil.rmtree(directory)
