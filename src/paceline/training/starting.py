"""What a training starts from that was not made here: a DCP checkpoint, optimizer included.

Weights become the base model; what AdamW kept becomes a generation of step 0, so that ranks of any
layout resume it as they resume everything else. Knows no ranks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidInput, SourceMissing
from paceline.models import ModelConfig, config_for, read_config
from paceline.models.files import CONFIG_FILE
from paceline.objects import ObjectStore, join_url
from paceline.profile import ModelSettings
from paceline.training.checkpoint import Generations
from paceline.training.identity import code_version, config_digest
from paceline.wire.training import TrainJob

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.models import Transformer
    from paceline.training.checkpoint.dcp_reading import Imported

log = logging.getLogger(__name__)

START_FILE = "started-from.json"  # in the base model's directory, and so in its digest


def is_checkpoint(source: Path) -> bool:
    """Return whether ``source`` is a directory as dcp.save writes it; needs no torch."""
    return (source / ".metadata").is_file()


def require_model(source: Path, code_ref: str) -> None:
    """Raise what keeps ``source`` from being what training starts from."""
    if code_ref:
        raise InvalidInput(
            "a model of your own starts from what its build() returns",
            got=f"--model {source}, training.code_ref {code_ref}",
            wanted="one of them",
            do="Load the weights in build(), or leave out --model.",
        )
    if not source.is_dir():
        raise SourceMissing("no such model directory", got=source, wanted="safetensors and config")
    if is_checkpoint(source):
        return
    if not any(source.glob("*.safetensors")) or not (source / CONFIG_FILE).is_file():
        raise InvalidInput(
            "no model of ours in the model directory",
            got=", ".join(sorted(each.name for each in source.iterdir())[:5]) or "nothing",
            wanted=f"*.safetensors and {CONFIG_FILE}, or what dcp.save wrote (.metadata)",
            where=source,
            do="Name the export of a training, or a directory in Llama's layout.",
        )


def model_of_dcp(
    source: Path,
    settings: ModelSettings,
    *,
    vocabulary: int = 256,
    separator: int = 0xFF,
    tokenizer_digest: str = "",
    cuts: dict[str, Any] | None = None,
    weights_only: bool = False,
) -> tuple[Transformer, ModelConfig, Imported]:
    """Return the model whose weights are in the DCP directory ``source``, and what was read.

    Its shape is ``source``'s config.json, else what ``settings`` (and the vocabulary) give. Raises
    InvalidInput where they do not fit each other, CorruptData where ``source`` is damaged.
    """
    import torch

    from paceline.models import Transformer
    from paceline.training.checkpoint.dcp_reading import read_dcp

    if (source / CONFIG_FILE).is_file():
        config = read_config(source)
    else:
        config = config_for(
            settings.parameters,
            settings.context,
            vocabulary,
            separator=separator,
            tokenizer_digest=tokenizer_digest,
            **(cuts or {}),
        )
    with torch.device("meta"):
        model = Transformer(config)
    model = model.to(getattr(torch, config.torch_dtype))
    found = read_dcp(source, model.state_dict(), weights_only=weights_only)
    model = model.to_empty(device="cpu")
    model.load_state_dict(found.weights)
    if found.cast:
        log.warning(
            "%d of %d weights have another dtype in the checkpoint: they are made %s source=%s",
            found.cast, len(found.weights), config.torch_dtype, source,
        )  # fmt: skip
    return model, config, found


@dataclass(frozen=True)
class Start:
    """State to begin with, as ``TrainState`` names it."""

    source: str
    tensors: dict[str, Tensor]
    trained: int  # parameters that bring what the optimiser kept
    of: int

    @classmethod
    def of_import(cls, source: Path, model: Transformer, found: Imported) -> Start | None:
        """Return what to begin with beside the weights; None where nothing was kept."""
        if not found.moments:
            return None
        weights = {f"model.{name}": each for name, each in found.weights.items()}
        parameters = len(list(model.parameters()))
        return cls(str(source.absolute()), weights | found.moments, found.trained, parameters)

    def digest(self) -> str:
        """Return a digest of every tensor."""
        import hashlib

        import torch

        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def seed(self, job: TrainJob, store: ObjectStore) -> bool:
        """Commit it as the job's step 0 unless the job has checkpoints; return whether it did."""
        from paceline.training.checkpoint.seeding import seed_generation

        generations = Generations(store, join_url(job.checkpoint_url, job.job_id))
        if generations.find().committed:
            return False
        seed_generation(
            generations,
            self.tensors,
            job_id=job.job_id,
            config_digest=config_digest(job),
            code_version=code_version(),
            source={"format": "torch.distributed.checkpoint", "directory": self.source},
        )
        return True
