"""What a model's policy asks of an export, before a node is busy: settings that follow from it, and
those that contradict it.

By the base's config and the headers of its weights alone. What only an evaluation knows (figures,
latency, memory) is left to the gate.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from typing import Any

from paceline.config import Policy, TrainingSettings
from paceline.errors import InvalidInput, SourceMissing
from paceline.models import CONFIG_FILE, INDEX_FILE, SINGLE, is_unread
from paceline.storage import ObjectStore
from paceline.training.base_check import MAX_FILE_BYTES, header_of

FLOATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
FILE_HEADER_BYTES = 1024  # of a file with one tensor, at most
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
PROGRAM, DTYPE = "training.export_program", "training.export_dtype"
FILE = "training.export_file_bytes"


@dataclass(frozen=True)
class BaseFacts:
    """What a published base says of what is trained from it."""

    dtype: str  # "" where its files do not say one
    parameters: int
    context: int | None
    largest: int = 0  # parameters of one tensor


def base_facts(url: str, store: ObjectStore) -> BaseFacts | None:
    """Return the facts of the model at ``url``; None where none is published, or where its files
    cannot be read, which ``check_base`` names."""
    try:
        found = {each.url.removeprefix(f"{url}/"): each for each in store.list(url)}
    except SourceMissing:  # no bucket yet
        return None
    tensors: dict[str, Any] = {}
    try:
        config = json.loads(store.get_bytes(found[CONFIG_FILE].url, MAX_FILE_BYTES))
        files = [each for each in found if each.endswith(".safetensors") and "/" not in each]
        if INDEX_FILE in found:  # others lie there too: the same weights under other names, say
            index = json.loads(store.get_bytes(found[INDEX_FILE].url, MAX_FILE_BYTES))
            files = sorted(set(index["weight_map"].values()))
        elif SINGLE in found:
            files = [SINGLE]
        for name in files:
            tensors |= json.loads(header_of(found[name], store)[8:])
        tensors.pop("__metadata__", None)
        tensors = {name: each for name, each in tensors.items() if not is_unread(name)}
        kinds = {FLOATS[each["dtype"]] for each in tensors.values() if each["dtype"] in FLOATS}
        sizes = [prod(each["shape"]) for each in tensors.values()]
        context = config.get("max_position_embeddings")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return BaseFacts(
        kinds.pop() if len(kinds) == 1 else "", sum(sizes), context, max(sizes, default=0)
    )


def settings_for(
    training: TrainingSettings,
    policy: Policy,
    given: Collection[str],
    base: BaseFacts | None,
) -> TrainingSettings:
    """Return ``training`` with the export that ``policy`` asks for, where it names none; ``given``
    are the keys that the training's submitter named. ``base``: None where that is not known.

    Raises InvalidInput where the gate would refuse whatever this training exports.
    """
    changes: dict[str, object] = {}
    if "torch.export" in policy.formats and not training.export_program:
        if training.code_ref or PROGRAM in given:
            got = "training.code_ref" if training.code_ref else f"{PROGRAM} = false"
            raise _refused(got, "torch.export", "formats")
        changes["export_program"] = True
    if training.code_ref:
        base = None  # a module of its own
    is_base = training.export_dtype == "base"
    asked = training.export_dtype if not is_base else base.dtype if base else ""
    parameters, largest = (base.parameters, base.largest) if base else (0, 0)
    has_program = training.export_program or bool(changes)
    copies, again = (2, ", and again in model.pt2") if has_program else (1, "")
    limited = {
        "max_model_bytes": (copies * parameters, f"{parameters:,} parameters in {asked}{again}"),
        "max_file_bytes": (largest, f"a tensor of {largest:,} parameters in {asked}"),
    }

    def exceeded(dtype: str) -> str:
        """Return the key of the first limit that weights in ``dtype`` exceed, or ""."""
        for key, (count, _) in limited.items():
            most = getattr(policy, key)
            header = FILE_HEADER_BYTES if key == "max_file_bytes" else 0
            if most is not None and count * BYTES[dtype] + header > most:
                return key
        return ""

    if asked and (asked not in policy.dtypes or exceeded(asked)):
        known = [each for each in policy.dtypes if each in BYTES]
        others = [each for each in known if not exceeded(each)]
        if not (is_base and DTYPE not in given and others):
            if asked in policy.dtypes or (known and not others):
                key = exceeded(asked if asked in policy.dtypes else known[0])
                raise _refused(limited[key][1], f"at most {getattr(policy, key)} bytes", key)
            raise _refused(f"weights in {asked}", " or ".join(policy.dtypes), "dtypes")
        changes["export_dtype"] = others[0]
    size, most_of_file = training.export_file_bytes, policy.max_file_bytes
    if most_of_file is not None and size > most_of_file:
        if FILE in given:
            raise _refused(f"{FILE} = {size}", f"at most {most_of_file}", "max_file_bytes")
        changes["export_file_bytes"] = most_of_file
    if policy.max_parameters is not None and parameters > policy.max_parameters:
        raise _refused(
            f"{parameters:,} parameters", f"at most {policy.max_parameters}", "max_parameters"
        )
    context = base.context if base else None
    if policy.min_context is not None and context is not None and context < policy.min_context:
        raise _refused(f"a context of {context}", f"at least {policy.min_context}", "min_context")
    return training.model_copy(update=changes)


def _refused(got: str, wanted: str, key: str) -> InvalidInput:
    return InvalidInput(
        "the model's policy would refuse what this training exports",
        got=got,
        wanted=wanted,
        where=f"gate.{key}",
        do="Change the training's settings or its base; the policy is the installation's.",
    )
