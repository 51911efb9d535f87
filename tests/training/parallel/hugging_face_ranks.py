"""Models of transformers in every way of training, in one launch of ranks.

``main`` with DIRECTORY FAMILY… writes the models below DIRECTORY/models (by transformers; OWN is
our transformer), trains all weights, LoRA, DoRA, on conversations (SFT) and on preferences (DPO),
these also with LoRA, by Muon, with a moving average and in bfloat16, exports below
DIRECTORY/exports, and prints one JSON object: ``ranks``, job → what rank 0 answered, and
``loaded``, what transformers and peft read of each export in a process that trained nothing.
test_hugging_face.py holds it to its promises.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.layouts.layouts import CPU, batch_of
from benchmarks.layouts.ranks import Job, run_jobs
from paceline.config import TrainingSettings
from paceline.data import REJECTED_AT, Batch
from paceline.models import (
    Pretrained,
    SavedTransformer,
    add_adapters,
    config_for,
    merge_adapters,
    new_model,
    save_model,
)
from paceline.training.checkpoint import TrainState, export
from paceline.training.loop import (
    Group,
    Preferences,
    TransformerWorkload,
    WeightAverage,
    load_weights,
    new_optimizer,
    parallelise_model,
)
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
    "HSDP": (4, {"mesh": {"dp": 2, "shard": 2}}),
    "FSDP2, recomputed": (2, {"mesh": {"shard": 2}, "activation_checkpointing": True}),
    "TP": (2, {"mesh": {"tp": 2}}),
    "TP, recomputed": (2, {"mesh": {"tp": 2}, "activation_checkpointing": True}),
    "DDP x TP": (4, {"mesh": {"dp": 2, "tp": 2}}),
    "FSDP2 x TP": (4, {"mesh": {"shard": 2, "tp": 2}}),
    "CP": (2, {"mesh": {"cp": 2}}),
    "CP, recomputed": (2, {"mesh": {"cp": 2}, "activation_checkpointing": True}),
    "DDP x CP": (4, {"mesh": {"dp": 2, "cp": 2}}),
    "FSDP2 x CP": (4, {"mesh": {"shard": 2, "cp": 2}}),
    "CP x TP": (4, {"mesh": {"cp": 2, "tp": 2}}),
    "PP": (2, {"mesh": {"pp": 2}}),
    "PP, gpipe, recomputed": (
        2,
        {"mesh": {"pp": 2, "schedule": "gpipe"}, "activation_checkpointing": True},
    ),
    "DDP x PP": (4, {"mesh": {"dp": 2, "pp": 2}}),
    "FSDP2 x PP": (4, {"mesh": {"shard": 2, "pp": 2}}),
    "PP x TP": (4, {"mesh": {"pp": 2, "tp": 2}}),
}
OWN = "own"  # our transformer
BRIEF = "llama"  # each kind in the ways that its code tells apart; EVERY_WAY has all
EVERY_WAY = "llama-every"  # also recomputed, and exported from each mesh
# kind → ways in which EVERY_WAY is recomputed
RECOMPUTED: dict[str, tuple[str, ...]] = {
    "": (
        "recomputed",
        "FSDP2, recomputed",
        "TP, recomputed",
        "CP, recomputed",
        "PP, gpipe, recomputed",
    ),
    **dict.fromkeys(("LoRA", "DoRA", "SFT", "DPO"), ("FSDP2, recomputed",)),
}
OTHERS_RECOMPUTED = ("FSDP2, recomputed", "TP, recomputed")  # all weights of the other families
SFT, DPO = "SFT", "DPO"  # what is learned from: conversations, preferences
# kind → its settings; of llama alone
MUON, AVERAGE, HALF = "Muon", "EMA", "bfloat16"
DECAY = 0.5
DIALS: dict[str, dict[str, Any]] = {
    MUON: {"optimizer": "muon"},
    AVERAGE: {"ema": {"decay": DECAY}},
    HALF: {"precision": "bfloat16"},
}
DIAL_WAYS = ("single", "DDP", "FSDP2", "TP")
# kind → the ways of BRIEF
BRIEF_WAYS: dict[str, tuple[str, ...]] = {
    "": ("single", "DDP", "FSDP2", "FSDP2, recomputed", "TP", "CP", "PP"),
    "LoRA": ("DDP", "FSDP2", "TP", "CP"),
    "DoRA": ("FSDP2",),
    SFT: ("DDP", "CP", "PP"),
    DPO: ("FSDP2, recomputed", "CP"),
    f"{DPO} LoRA": ("DDP", "FSDP2"),
    MUON: ("FSDP2", "TP"),
    AVERAGE: ("FSDP2",),
    HALF: ("FSDP2",),
}
BETA = 0.3
BF16 = "llama-bf16"
FOUR = "llama-four"  # llama on four ranks
FEW_WAYS = {
    BF16: ["FSDP2"],
    FOUR: [
        *("HSDP", "DDP x TP", "FSDP2 x TP", "DDP x CP", "FSDP2 x CP", "CP x TP"),
        *("DDP x PP", "FSDP2 x PP", "PP x TP"),
    ],
}
SHARDED_FILES = ("qwen3", "gemma2")  # written by transformers in several files


# adapters → their settings
ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {"r": 4, "lora_alpha": 12},
    "DoRA": {"r": 3, "lora_alpha": 8, "use_dora": True, "target_modules": ["all-linear"]},
}


def adapters_of(kind: str) -> str:
    """Return the adapters of "SFT LoRA", "DoRA", …; "": all weights are trained."""
    last = kind.rsplit(" ", maxsplit=1)[-1]
    return last if last in ADAPTERS else ""


def data_of(kind: str) -> str:
    """Return SFT or DPO, "" for rows of text."""
    first = kind.split(" ", maxsplit=1)[0]
    return first if first in (SFT, DPO) else ""


def ways_of(family: str, kind: str = "") -> list[str]:
    """Return the ways in which ``family`` is trained; DoRA and DPO need whole matrices, and so do
    adapters of our transformer; adapters and DPO are not cut into stages."""
    if family == BRIEF:
        return list(BRIEF_WAYS[kind])
    if kind in DIALS:
        return list(DIAL_WAYS)
    adapters, is_dpo = adapters_of(kind), data_of(kind) == DPO
    is_whole = adapters == "DoRA" or is_dpo or (family == OWN and bool(adapters))
    recomputed = OTHERS_RECOMPUTED if kind == "" else ()
    if family == EVERY_WAY:
        recomputed = RECOMPUTED.get(kind, ())
    every = [
        way
        for way, (ranks, _) in WAYS.items()
        if (ranks < 4 or family != EVERY_WAY)
        and way != "CP x TP"  # of two key-value heads
        and ("recomputed" not in way or way in recomputed)
    ]
    return [
        way
        for way in FEW_WAYS.get(family, every)
        if not (is_whole and "TP" in way) and not ("PP" in way and (adapters or is_dpo))
    ]


def kinds_of(family: str) -> tuple[str, ...]:
    """Return what ``family`` is trained by; "": all weights, by rows of text."""
    if family == BF16:
        return ("LoRA",)
    if family == BRIEF:
        return tuple(BRIEF_WAYS)
    dials = DIALS if family == EVERY_WAY else ()
    return ("", *ADAPTERS, SFT, f"{SFT} LoRA", DPO, f"{DPO} LoRA", *dials)


def exported_of(family: str, kind: str = "") -> list[str]:
    """Return the ways whose model is exported: the last of the family's, of ``EVERY_WAY`` more."""
    if family == OWN or kind not in ("", *ADAPTERS):
        return []
    wanted = ("FSDP2", "TP", "FSDP2 x TP", "PP", "FSDP2 x PP")
    ways = [each for each in ways_of(family, kind) if each in wanted]
    return ways if family in (BRIEF, EVERY_WAY) else ways[-1:]


def settings_of(way: str, kind: str = "") -> TrainingSettings:
    ranks, more = WAYS[way]
    own: dict[str, Any] = dict(DIALS.get(kind, {}))
    if adapters := adapters_of(kind):
        own |= {"lora": ADAPTERS[adapters], "seed": 11}
    own |= {"dpo": {"beta": BETA}} if data_of(kind) == DPO else {}
    return TrainingSettings.model_validate({
        "ranks": ranks, "batch_sequences": 8, "learning_rate": RATE, "clip_norm": CLIP, **more,
        **own,
    })  # fmt: skip


def trained(directory: Path, way: str, into: Path | None = None, kind: str = "") -> dict[str, Any]:
    """Train as ranks do, and export into ``into``."""
    settings = settings_of(way, kind)
    world = WAYS[way][0]
    group = Group(dist.get_rank(), world) if world > 1 else Group()
    is_ours = directory.name == OWN
    saved = (SavedTransformer if is_ours else Pretrained).open(directory)
    workload: Any = TransformerWorkload(saved.config if is_ours else saved)
    mesh = open_mesh(MeshSpec.of(settings.mesh, world))
    model, added, read = saved.build(), None, 0
    if settings.lora is not None:
        added = add_adapters(model, settings.lora, settings.seed)
    if settings.dpo is not None:
        workload = Preferences(workload, settings.dpo.beta)
        its: Any = SimpleNamespace(
            job=SimpleNamespace(settings=settings), adapters=added, model=model, workload=workload,
            saved=saved,
        )  # fmt: skip
        parallel, _ = parallelise_model(its, mesh)
    else:
        parallel = parallelise(model, mesh, settings, workload)
        read = load_weights(saved, parallel, added)
    optimizer = new_optimizer(parallel.modules, settings)
    average = WeightAverage(optimizer, settings.ema)
    losses, norms = [], []
    for step in range(STEPS):
        whole = lesson(batch_of(step), kind).global_tokens
        batch = lesson(batch_of(step, parallel.data_rank, parallel.data_world), kind)
        sums = parallel.accumulate([workload.inputs(batch, CPU)], 1.0 / whole)
        norms.append(parallel.clip(settings.clip_norm))
        loss, counted = group.sums([float(sums.loss), sums.weight])
        losses.append(loss / counted)
        optimizer.step()
    answer: dict[str, Any] = {"losses": losses, "norms": norms, "read": read}
    (module,) = parallel.modules
    if settings.ema is not None:
        with average.applied():
            answer["averaged"] = look(module)
    if added is not None:
        state = TrainState(parallel.modules, optimizer, group, without_frozen=True)
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
    if into is not None and isinstance(saved, Pretrained):
        weights = {}
        for name, each in module.state_dict().items():
            full = each.full_tensor() if isinstance(each, DTensor) else each
            weights[name] = digest(full.to(saved.dtype))
        export(TrainState(parallel.modules, optimizer, group), None, into, pretrained=saved)
        if mesh.spec.pp == 1:
            module.eval()
            answer["logits"] = look(module)
        else:
            weights = with_other_stages(weights, world)
        answer["weights"] = weights
    return answer


def with_other_stages(weights: dict[str, str], world: int) -> dict[str, str]:
    """Add what other ranks hold: both ends of tied weights must be equal."""
    found: list[Any] = [None] * world
    dist.all_gather_object(found, weights)
    whole: dict[str, str] = {}
    for each in found:
        assert all(whole.get(name, value) == value for name, value in each.items())
        whole |= each
    return whole


def lesson(batch: Batch, kind: str) -> Batch:
    """Return ``batch`` as conversations, of which some tokens count, or as pairs of answers."""
    if not data_of(kind):
        return batch
    counts_BT = batch.weights_BT * (batch.targets_BT % 3 != 0)
    if data_of(kind) == SFT:
        return dataclasses.replace(
            batch, weights_BT=counts_BT, global_tokens=float(counts_BT.sum())
        )
    return dataclasses.replace(
        batch, weights_BT=counts_BT, documents_BT=None, positions_BT=None,
        features={REJECTED_AT: np.full(counts_BT.shape, 11, np.float32)},
        global_tokens=float(len(batch.rows)),
    )  # fmt: skip


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


def plain(directory: Path, kind: str = "") -> dict[str, Any]:
    """The loop that a user of transformers writes: each document by itself, no masks."""
    from transformers import AutoModelForCausalLM

    settings = settings_of("single")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    if adapters := adapters_of(kind):
        model = with_peft(model, adapters)
    base = copy.deepcopy(model)
    average = None
    if kind == AVERAGE:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizers = plain_optimizers(model, settings.weight_decay, kind)
    half = torch.autocast("cpu", torch.bfloat16, enabled=kind == HALF)
    losses, norms = [], []
    for step in range(STEPS):
        batch = lesson(batch_of(step), kind)
        total = torch.zeros(())
        if data_of(kind) == DPO:
            total = sum((pair_loss(model, base, batch, row) for row in range(8)), total)
        by_row = batch.documents_BT
        for row, documents_T in enumerate([] if by_row is None else by_row):
            for document in sorted(set(documents_T.tolist()) - {-1}):
                its = documents_T == document
                inputs, targets = (
                    torch.from_numpy(each[row][its].astype(np.int64))
                    for each in (batch.inputs_BT, batch.targets_BT)
                )
                weights = torch.from_numpy(batch.weights_BT[row][its])
                if data_of(kind) == SFT:
                    total = total + labelled_loss(model, inputs, targets, weights)
                    continue
                with half:
                    logits = model(input_ids=inputs[None]).logits[0]
                loss_T = F.cross_entropy(logits.float(), targets, reduction="none")
                total = total + torch.dot(loss_T, weights)
        model.zero_grad()
        loss = total / batch.global_tokens
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        losses.append(float(loss.detach()))
        for each in optimizers:
            each.step()
        if average is not None:
            average.update_parameters(model)
    answer = {"losses": losses, "norms": norms}
    if average is not None:
        with torch.no_grad():
            logits = average(input_ids=tokens()).logits
        answer["averaged"] = logits.flatten()[::97].tolist()
    return answer


def plain_optimizers(model: Any, decay: float, kind: str) -> list[torch.optim.Optimizer]:
    """AdamW; for Muon it has what is no matrix of a hidden layer."""
    learnt = {name: each for name, each in model.named_parameters() if each.requires_grad}
    hidden = [
        each
        for name, each in learnt.items()
        if kind == MUON and each.ndim == 2 and "embed" not in name and "lm_head" not in name
    ]
    rest = [each for each in learnt.values() if all(each is not one for one in hidden)]
    groups = [
        {"params": [each for each in rest if each.ndim >= 2], "weight_decay": decay},
        {"params": [each for each in rest if each.ndim < 2], "weight_decay": 0.0},
    ]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))]
    if hidden:
        found.append(
            torch.optim.Muon(hidden, lr=RATE, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        )
    return found


def labelled_loss(
    model: Any, inputs_T: torch.Tensor, targets_T: torch.Tensor, weights_T: torch.Tensor
) -> torch.Tensor:
    """The sum that transformers computes of labels, -100 where none counts."""
    counted = int(weights_T.sum())
    if not counted:
        return torch.zeros(())
    ids = torch.cat([inputs_T, targets_T[-1:]])
    labels = torch.cat([torch.tensor([-100]), targets_T.where(weights_T > 0, -100)])
    found: torch.Tensor = model(input_ids=ids[None], labels=labels[None]).loss * counted
    return found


def pair_loss(model: Any, base: Any, batch: Batch, row: int) -> torch.Tensor:
    """The loss of one pair of answers, each by itself (arXiv 2305.18290, equation 7)."""
    at = int(batch.features[REJECTED_AT][row, 0])
    gained = []
    for part in (slice(0, at), slice(at, None)):
        inputs, targets = (
            torch.from_numpy(each[row][part].astype(np.int64))
            for each in (batch.inputs_BT, batch.targets_BT)
        )
        counts = torch.from_numpy(batch.weights_BT[row][part])
        with torch.no_grad():
            reference = base(input_ids=inputs[None]).logits[0]
        policy = model(input_ids=inputs[None]).logits[0]
        mine, its = (
            torch.dot(F.log_softmax(each, -1).gather(1, targets[:, None])[:, 0], counts)
            for each in (policy, reference)
        )
        gained.append(BETA * (mine - its))
    return -F.logsigmoid(gained[0] - gained[1])


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


def answered(root: Path, families: list[str]) -> dict[str, Any]:
    """Train all weights, LoRA and DoRA of each family in each way, and load the exports."""
    jobs, loads = [], {}
    for family in [*families, *([BF16] if BRIEF in families else [])]:
        path = root / "models" / family
        if family == OWN:
            config = config_for(60_000, 24, stages=2, parts=2)
            save_model(new_model(config, 7), config, path)
        else:
            write_model(
                family.split("-")[0],
                path,
                shard="20KB" if family in SHARDED_FILES else "1GB",
                dtype=torch.bfloat16 if family == BF16 else torch.float32,
                **({"num_key_value_heads": 4} if family == FOUR else {}),
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


def main() -> None:
    sys.stdout.write(json.dumps(answered(Path(sys.argv[1]), sys.argv[2:])) + "\n")
