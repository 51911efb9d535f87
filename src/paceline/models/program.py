"""A ``torch.export`` program of a model directory: written beside its safetensors, and checked.

The program has the weights in it, and runs without Paceline. It is compared with the model in the
process that makes it, before it is a file: nothing of Paceline's ever loads such a file, because an
archive of another origin may contain pickled objects. Ours contains none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from paceline.errors import InvalidInput
from paceline.models.files import PROGRAM_FILE, file_sha256, is_pretrained
from paceline.models.pretrained import Pretrained
from paceline.models.weights import SavedTransformer
from paceline.schemas import ProgramCheck

# Of the highest logit: float32 differs where the compiler of a machine adds in another order.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
TRACED, CHECKED = (2, 16), (3, 33)  # rows and tokens, at most


def exported(model: nn.Module, context: int) -> ExportedProgram:
    """Return the program of ``model`` (logits_BTV of tokens_BT), for any number of rows of up to
    ``context`` tokens; ``model`` may be on the meta device.

    Raises InvalidInput, which names the model and what cannot be exported.
    """
    rows, tokens = TRACED
    device = next(model.parameters()).device
    tokens_BT = torch.zeros(rows, min(tokens, context), dtype=torch.int64, device=device)
    shape = {0: Dim("batch", min=1), 1: Dim("sequence", min=1, max=context)}
    try:
        with torch.no_grad():
            return torch.export.export(model.eval(), (tokens_BT,), dynamic_shapes=(shape,))
    except Exception as error:
        raise InvalidInput(
            "the model cannot be exported as a program",
            got=f"{type(model).__name__}: {str(error).strip().splitlines()[0][:300]}",
            wanted="one graph for any number of rows and tokens",
            where="training.export_program",
            do="Leave it out: the safetensors are exported all the same.",
        ) from error


def write_program(directory: Path) -> ProgramCheck:
    """Write the program of the model in ``directory`` beside its weights, in their dtype; return
    how far its logits are from the model's own on random tokens, of another shape than traced.

    Holds the whole model. Raises InvalidInput as ``exported`` does, or where they differ.
    """
    found = (Pretrained if is_pretrained(directory) else SavedTransformer).open(directory)
    model = found.load().to(found.dtype)
    program = exported(model, found.longest_context)
    rows, tokens = CHECKED
    shape = (rows, min(tokens, found.longest_context))
    tokens_BT = torch.randint(found.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        own_BTV: Tensor = model(tokens_BT).float()
        graph: Any = program.module()
        apart = float((graph(tokens_BT).float() - own_BTV).abs().max())
    most = TOLERANCE[found.dtype] * float(own_BTV.abs().max())
    if not apart <= most:  # NaN too
        raise InvalidInput(
            "the exported program is not the model",
            got=f"logits that differ by {apart:.3g}",
            wanted=f"at most {most:.3g}",
            where="training.export_program",
        )
    program.example_inputs = None  # the one part of the archive that torch would pickle
    path = directory / PROGRAM_FILE
    torch.export.save(program, path)
    return ProgramCheck(
        file=PROGRAM_FILE,
        sha256=file_sha256(path),
        bytes=path.stat().st_size,
        max_difference=apart,
        rows=shape[0],
        tokens=shape[1],
        torch=torch.__version__,
    )
