"""The files of a model directory, read without torch: config, weights index, weights digest.

The layout is the one Hugging Face tools read: ``config.json``, ``model.safetensors.index.json`` and
``model-0000i-of-0000N.safetensors``. Rejects formats that can run code when read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from paceline.errors import CorruptData, InvalidInput, SourceMissing, short_repr
from paceline.models.config import FAMILIES, USER_CODE, ModelConfig, UserCodeConfig
from paceline.schemas import digest_of, parse_json

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"  # has the chat template, or one lies beside it
INDEX_FILE = "model.safetensors.index.json"
MULTIMODAL_GEMMA = (  # what to do with one: its text model is of a family that is trained
    "Save its text model: whole = AutoModelForImageTextToText.from_pretrained(…); "
    "text = AutoModelForCausalLM.from_config(whole.config.text_config); "
    "text.model.load_state_dict(whole.model.language_model.state_dict()); text.save_pretrained(…)."
)
ADAPTER_FILE = "adapter_config.json"  # peft's
# What figures of a model follow from beside its weights: how it is built, what it reads, how it is
# asked in a chat, and which tokens end what it writes.
DESCRIBING = (
    CONFIG_FILE,
    TOKENIZER_FILE,
    INDEX_FILE,
    TOKENIZER_CONFIG_FILE,
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
)
SUFFIX = ".safetensors"
PROGRAM_FILE = "model.pt2"  # a torch.export program, which is written and never loaded
UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy", ".npz", ".h5")
# What transformers' Trainer writes beside the weights to resume by; not weights, and never read.
OF_TRAINER = ("training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
MAX_JSON_BYTES = 16 * 1024 * 1024

Config = TypeVar("Config", ModelConfig, UserCodeConfig)


def read_config(directory: Path) -> ModelConfig:
    """Return the model configuration in ``directory/config.json``.

    Raises SourceMissing where there is none, InvalidInput where it is not one of our models.
    """
    path = Path(directory) / CONFIG_FILE
    raw = read_json(path)
    if raw.get("model_type") == USER_CODE:
        raise InvalidInput(
            "a model of user code is built by that code alone",
            got=f"code_ref {raw.get('code_ref')}",
            wanted="a model of Paceline's or of transformers",
            where=path,
            do="Train it with training.code_ref; judge it with `paceline evaluate`.",
        )
    return config_of(raw, path)


def config_of(raw: dict[str, Any], where: Path | str) -> ModelConfig:
    """Return the configuration of one of our models; raises InvalidInput for another ``raw``."""
    return _parsed(ModelConfig, raw, where)


def read_user_code(directory: Path) -> UserCodeConfig | None:
    """Return what builds the user's module whose weights are in ``directory``; None where its
    ``config.json`` is of another model. Raises what ``read_config`` does."""
    path = Path(directory) / CONFIG_FILE
    return user_code_of(read_json(path), path)


def user_code_of(raw: dict[str, Any], where: Path | str) -> UserCodeConfig | None:
    """Return what the ``config.json`` that ``raw`` is says of user code; None of another model."""
    return _parsed(UserCodeConfig, raw, where) if raw.get("model_type") == USER_CODE else None


def _parsed(kind: type[Config], raw: dict[str, Any], path: Path | str) -> Config:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidInput(
            "model config is not acceptable",
            got=f"{'.'.join(str(part) for part in first['loc'])} = {short_repr(first['input'])}",
            wanted=first["msg"],
            where=path,
        ) from error


def read_pretrained_config(directory: Path) -> dict[str, Any]:
    """Return the ``config.json`` of a directory in transformers' layout, as it stands there.

    Raises InvalidInput for one that is not trained: of another family, quantised, with code of its
    own, an adapter, or a tokenizer that is no tokenizer.json.
    """
    path = directory / CONFIG_FILE
    require_whole(directory)
    raw = read_json(path)
    if "auto_map" in raw:
        raise InvalidInput(
            "model needs code of its own directory",
            got="auto_map (trust_remote_code)",
            wanted=f"one of {', '.join(FAMILIES)}",
            where=path,
            do="Train it as a model of your own: training.code_ref.",
        )
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise InvalidInput(
            "model family is not supported",
            got=f"model_type {family!r}",
            wanted=f"one of {', '.join(FAMILIES)}",
            where=path,
            do=MULTIMODAL_GEMMA
            if family == "gemma3"
            else "Train it as a model of your own: training.code_ref.",
        )
    made_for = raw.get("architectures") or [FAMILIES[family]]
    if FAMILIES[family] not in made_for:
        raise InvalidInput(
            "not a language model",
            got=made_for,
            wanted=FAMILIES[family],
            where=path,
            do="Take the checkpoint with its head (lm_head). Where embeddings are tied, "
            "transformers adds it: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…).",
        )
    if raw.get("quantization_config"):
        raise InvalidInput(
            "quantised weights are not trained",
            got="quantization_config",
            wanted="weights in float32, bfloat16 or float16",
            where=path,
        )
    if not (directory / TOKENIZER_FILE).is_file():
        for name in OTHER_TOKENIZERS:
            if (directory / name).is_file():
                raise InvalidInput(
                    "tokenizer is not a tokenizer.json",
                    got=name,
                    wanted=TOKENIZER_FILE,
                    where=directory,
                    do="Save it with transformers: AutoTokenizer.from_pretrained(…)"
                    ".save_pretrained(…).",
                )
    return raw


def is_pretrained(directory: Path) -> bool:
    """Return whether ``directory`` is read as transformers' layout, not as our own."""
    names = {each.name for each in directory.glob("*.safetensors*")}
    return lies_as_pretrained(names, lambda: read_json(directory / CONFIG_FILE))


def lies_as_pretrained(names: Collection[str], read: Callable[[], dict[str, Any]]) -> bool:
    """Return whether files ``names`` with the config that ``read`` returns are in transformers'
    layout. Ours has an index and no other setting in its config than ours, or is of user code.
    """
    if INDEX_FILE not in names and any(each.endswith(SUFFIX) for each in names):
        return True
    config = read()
    if config.get("model_type") == USER_CODE:
        return False
    known = set(config) <= set(ModelConfig.model_fields)
    return not (known and config.get("model_type", "llama") == "llama")


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of ``directory`` in order of name.

    Raises SourceMissing if there are none, InvalidInput where weights come in a format that runs
    code.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise SourceMissing("no model here", got="no such directory", where=directory)
    unsafe = sorted(
        each.name
        for each in directory.iterdir()
        if each.suffix in UNSAFE_SUFFIXES
        and not each.name.startswith("rng_state")
        and each.name not in OF_TRAINER
    )
    if unsafe:
        raise InvalidInput(
            "model weights are not safetensors",
            got=", ".join(unsafe[:5]),
            wanted="*.safetensors and JSON only",
            where=directory,
            do="Convert them to safetensors; pickled weights can run code and are never loaded.",
        )
    found = sorted(each for each in directory.iterdir() if each.suffix == SUFFIX)
    if not found:
        raise SourceMissing("model has no weights", wanted="*.safetensors", where=directory)
    return found


def require_whole(directory: Path) -> None:
    """Raise InvalidInput where ``directory`` has an adapter that is not merged into its base."""
    if (directory / ADAPTER_FILE).is_file():
        raise InvalidInput(
            "an adapter is not a model",
            got=ADAPTER_FILE,
            wanted="the model with the adapter merged into its weights",
            where=directory,
            do="Merge it with peft: PeftModel.from_pretrained(…).merge_and_unload()"
            ".save_pretrained(…).",
        )


def read_index(directory: Path) -> dict[str, str]:
    """Return ``tensor name → file name`` of the index in ``directory``, names checked."""
    path = Path(directory) / INDEX_FILE
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidInput("weights index is malformed", wanted="a weight_map", where=path)
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(SUFFIX):
            raise InvalidInput(
                "weights index names an unacceptable file",
                got=f"{name} in {file!r}",
                wanted="a plain *.safetensors file name",
                where=path,
            )
    return dict(weight_map)


def weights_digest(directory: Path) -> str:
    """Return one SHA-256 (hex) over names and bytes of the safetensors files in ``directory``."""
    return digest_of({path.name: file_sha256(path) for path in weight_files(directory)})


def model_digest(weights_digest: str, sha256: Mapping[str, str]) -> str:
    """Return one SHA-256 (hex) over all that a model's predictions follow from.

    ``sha256``: of its files by name, of which those of ``DESCRIBING`` count.
    """
    return digest_of([weights_digest, *(sha256.get(name) for name in DESCRIBING)])


def local_model_digest(directory: Path) -> str:
    """Return the ``model_digest`` of the files in ``directory``."""
    digest, paths = weights_digest(directory), [directory / name for name in DESCRIBING]
    return model_digest(digest, {each.name: file_sha256(each) for each in paths if each.is_file()})


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``; raises SourceMissing, CorruptData or InvalidInput."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise InvalidInput("file is too large", wanted=f"≤ {MAX_JSON_BYTES} bytes", where=path)
        return json_object(path.read_bytes(), path)
    except FileNotFoundError as error:
        raise SourceMissing(
            "model file is missing", got=f"no {path.name}", where=path.parent
        ) from error


def json_object(data: bytes, where: Path | str) -> dict[str, Any]:
    """Return the JSON object that ``data`` is; raises CorruptData, which names ``where``."""
    try:
        value = parse_json(data)
    except ValueError as error:
        raise CorruptData("model file is not JSON", got=error, where=where) from error
    if not isinstance(value, dict):
        raise CorruptData("model file is not a JSON object", got=type(value).__name__, where=where)
    return value
