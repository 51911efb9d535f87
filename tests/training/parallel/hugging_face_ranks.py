"""Models of transformers in every way of training, in one launch of ranks.

``python -m tests.training.parallel.hugging_face_ranks DIRECTORY FAMILY…`` writes the models below
DIRECTORY/models (by transformers), trains all weights, LoRA and DoRA of each, exports below
DIRECTORY/exports, and prints one JSON object: ``ranks``, job → what rank 0 answered, and
``loaded``, what transformers and peft read of each export in a process that trained nothing.
test_hugging_face.py holds it to its promises.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from benchmarks.layouts.layouts import CPU, batch_of
from benchmarks.layouts.ranks import Job, run_jobs
from paceline.config import TrainingSettings
from paceline.models import Pretrained, add_adapters, merge_adapters
from paceline.training.checkpoint import TrainState, export
from paceline.training.loop import Group, TransformerWorkload, load_weights, new_optimizer
from paceline.training.parallel import MeshSpec, open_mesh, parallelise
from tests.support.hugging_face import write_model

STEPS = 3
RATE = 3e-3
CLIP = 1.0
# way → ranks and settings
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "recomputed": (1, {"activation_checkpointing": True}),
    "DDP": (2, {"mesh": {"dp": 2}}),
    "FSDP2": (2, {"mesh": {"shard": 2}}),
    "FSDP2, recomputed": (2, {"mesh": {"shard": 2}, "activation_checkpointing": True}),
    "TP": (2, {"mesh": {"tp": 2}}),
    "TP, recomputed": (2, {"mesh": {"tp": 2}, "activation_checkpointing": True}),
    "DDP x TP": (4, {"mesh": {"dp": 2, "tp": 2}}),
    "FSDP2 x TP": (4, {"mesh": {"shard": 2, "tp": 2}}),
}
EVERY_WAY = "llama"  # also recomputed, and exported from each mesh
RECOMPUTED = {
    "": ("recomputed", "FSDP2, recomputed", "TP, recomputed"),
    "LoRA": ("FSDP2, recomputed",),
}
FOUR_RANKS = ("qwen2", "gpt_neox")  # the families that four ranks train, too
BF16 = "llama-bf16"
FOUR = "llama-four"  # llama on four ranks
FEW_WAYS = {BF16: ["FSDP2"], FOUR: ["DDP x TP", "FSDP2 x TP"]}  # and no DoRA
SHARDED_FILES = ("qwen3", "gemma2")  # written by transformers in several files


# adapters → their settings
ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {"r": 4, "lora_alpha": 12},
    "DoRA": {"r": 3, "lora_alpha": 8, "use_dora": True, "target_modules": ["all-linear"]},
}


def ways_of(family: str, adapters: str = "") -> list[str]:
    """Return the ways in which ``family`` is trained; DoRA needs whole matrices.

    Blocks are recomputed for one family: nothing in it depends on the family.
    """
    if family in FEW_WAYS:
        return FEW_WAYS[family]
    recomputed = RECOMPUTED.get(adapters, ()) if family == EVERY_WAY else ()
    return [
        way
        for way, (ranks, _) in WAYS.items()
        if (ranks < 4 or family in FOUR_RANKS)
        and not (adapters == "DoRA" and "TP" in way)
        and ("recomputed" not in way or way in recomputed)
    ]


def kinds_of(family: str) -> tuple[str, ...]:
    """Return the adapters of ``family``; "" trains all weights."""
    return ("", "LoRA") if family in FEW_WAYS else ("", *ADAPTERS)


def exported_of(family: str, adapters: str = "") -> list[str]:
    """Return the ways whose model is exported: the last of the family's, of ``EVERY_WAY`` more."""
    ways = [each for each in ways_of(family, adapters) if each in ("FSDP2", "TP", "FSDP2 x TP")]
    return ways if family == EVERY_WAY else ways[-1:]


def settings_of(way: str, adapters: str = "") -> TrainingSettings:
    ranks, more = WAYS[way]
    lora = {"lora": ADAPTERS[adapters], "seed": 11} if adapters else {}
    return TrainingSettings.model_validate({
        "ranks": ranks, "batch_sequences": 8, "learning_rate": RATE, "clip_norm": CLIP, **more,
        **lora,
    })  # fmt: skip


def trained(
    directory: Path, way: str, into: Path | None = None, adapters: str = ""
) -> dict[str, Any]:
    """Train as ranks do, and export into ``into``."""
    settings = settings_of(way, adapters)
    world = WAYS[way][0]
    group = Group(dist.get_rank(), world) if world > 1 else Group()
    pretrained = Pretrained.open(directory)
    workload = TransformerWorkload(pretrained)
    mesh = open_mesh(MeshSpec.of(settings.mesh, world))
    model, added = workload.build(), None
    if settings.lora is not None:
        added = add_adapters(model, settings.lora, settings.seed)
    parallel = parallelise(model, mesh, settings, workload)
    read = load_weights(pretrained, parallel, added)
    optimizer = new_optimizer(parallel.modules, settings)
    losses, norms = [], []
    for step in range(STEPS):
        whole = batch_of(step).global_tokens
        batch = batch_of(step, parallel.data_rank, parallel.data_world)
        sums = parallel.accumulate([workload.inputs(batch, CPU)], 1.0 / whole)
        norms.append(parallel.clip(settings.clip_norm))
        loss, counted = group.sums([float(sums.loss), sums.weight])
        losses.append(loss / counted)
        optimizer.step()
    answer: dict[str, Any] = {"losses": losses, "norms": norms, "read": read}
    (module,) = parallel.modules
    if added is not None:
        state = TrainState(parallel, optimizer, group, without_frozen=True)
        answer["sent"] = parallel.bytes_reduced
        answer["trained"] = sum(each.numel() for each in added.initial.values())
        answer["saved"] = sorted(name for name in state.tensors() if not name.startswith("step."))
        if into is not None:
            module.eval()
            answer["unmerged"] = look(module)
            parts = dict(module.named_parameters())
            whole = {name: parts[name].full_tensor() for name in added.initial}
            added.write(whole, into.with_name(f"{into.name}-adapter"), "base", "0" * 64)
        merge_adapters(module)
    weights = {}
    for name, each in module.state_dict().items():
        full = each.full_tensor() if isinstance(each, DTensor) else each
        weights[name] = digest(full.to(pretrained.dtype))
    if into is not None:
        export(TrainState(parallel, optimizer, group), None, into, pretrained=pretrained)
        module.eval()
        answer["logits"] = look(module)
        answer["weights"] = weights
    return answer


def look(module: torch.nn.Module) -> list[float]:
    """Some of the logits; the ranks of one ``tp`` hold parts of them."""
    with torch.no_grad():
        logits = module(tokens())
    whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
    found: list[float] = whole.flatten()[::97].tolist()
    return found


def tokens() -> torch.Tensor:
    return torch.from_numpy(batch_of(9).inputs_BT.astype(np.int64))


def digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(raw.data).hexdigest()


def plain(directory: Path, adapters: str = "") -> dict[str, Any]:
    """The loop that a user of transformers writes: each document by itself, no masks."""
    from transformers import AutoModelForCausalLM

    settings = settings_of("single")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    if adapters:
        model = with_peft(model, adapters)
    learnt = [each for each in model.parameters() if each.requires_grad]
    decayed = [each for each in learnt if each.ndim >= 2]
    others = [each for each in learnt if each.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=RATE,
        betas=(0.9, 0.95),
    )
    losses, norms = [], []
    for step in range(STEPS):
        batch = batch_of(step)
        assert batch.documents_BT is not None
        total = torch.zeros(())
        for row, documents_T in enumerate(batch.documents_BT):
            for document in sorted(set(documents_T.tolist()) - {-1}):
                its = documents_T == document
                inputs, targets = (
                    torch.from_numpy(each[row][its].astype(np.int64))
                    for each in (batch.inputs_BT, batch.targets_BT)
                )
                logits = model(input_ids=inputs[None]).logits[0]
                loss_T = F.cross_entropy(logits, targets, reduction="none")
                total = total + torch.dot(loss_T, torch.from_numpy(batch.weights_BT[row][its]))
        optimizer.zero_grad()
        loss = total / batch.global_tokens
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        losses.append(float(loss.detach()))
        optimizer.step()
    return {"losses": losses, "norms": norms}


def with_peft(model: Any, adapters: str) -> Any:
    """What a user of peft writes."""
    from peft import LoraConfig, get_peft_model

    lora = dict(ADAPTERS[adapters])
    if lora.get("target_modules") == ["all-linear"]:
        lora["target_modules"] = "all-linear"
    torch.manual_seed(11)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))


def loaded_adapter(base: Path, directory: Path) -> list[float]:
    """What a user of peft loads from an adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        logits = PeftModel.from_pretrained(model, directory).eval()(input_ids=tokens()).logits
    found: list[float] = logits.flatten()[::97].tolist()
    return found


def loaded(directory: Path) -> dict[str, Any]:
    """What a user of transformers loads from an export."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    weights, dtype = {name: digest(each) for name, each in model.state_dict().items()}, model.dtype
    with torch.no_grad():
        logits = model.float().eval()(input_ids=tokens()).logits
    return {
        "logits": logits.flatten()[::97].tolist(),
        "weights": weights,
        "dtype": str(dtype),
        "wrong": sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"]])),
    }


def main(root: Path, families: list[str]) -> dict[str, Any]:
    """Train all weights, LoRA and DoRA of each family in each way, and load the exports."""
    jobs, loads = [], {}
    for family in [*families, *([BF16] if EVERY_WAY in families else [])]:
        path = write_model(
            family.split("-")[0],
            root / "models" / family,
            shard="20KB" if family in SHARDED_FILES else "1GB",
            dtype=torch.bfloat16 if family == BF16 else torch.float32,
        )
        loads[family] = path
        for kind in kinds_of(family):
            name = f"{family} {kind}".strip()
            jobs.append(Job(f"{name}: plain", 1, lambda p=path, k=kind: plain(p, k)))
            for way in ways_of(family, kind):
                into = None
                if way in exported_of(family, kind):
                    into = loads[f"{name}: {way}"] = root / "exports" / f"{name}: {way}"
                jobs.append(
                    Job(
                        f"{name}: {way}",
                        WAYS[way][0],
                        lambda p=path, w=way, i=into, k=kind: trained(p, w, i, k),
                    )
                )
    ranks = {each["job"]: each["answer"] for each in run_jobs(jobs, deadline_s=280)}
    return {
        "ranks": ranks,
        "loaded": {name: loaded(path) for name, path in loads.items()},
        "adapters": {
            name: loaded_adapter(loads[name.split()[0]], adapter)
            for name, path in loads.items()
            if (adapter := path.with_name(f"{path.name}-adapter")).is_dir()
        },
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), sys.argv[2:])) + "\n")
