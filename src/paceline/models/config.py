"""Model configuration: one setting (``parameters``) determines widths, depths and heads.

The field names are those of Llama's ``config.json``, because the architecture is the same and other
tools read them. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from pydantic import Field, model_validator

from paceline.errors import InvalidInput, short_repr
from paceline.manifest import ties_embeddings
from paceline.schemas import Record

BYTES = 256  # vocabulary size with one token per byte
SEPARATOR_BYTE = 0xFF  # before and after each document; never part of UTF-8 text
SMALLEST, LARGEST = 10_000, 100_000_000_000
WIDTH_PER_LAYER = 96  # wide and shallow: 2 x 256 steps 1.3 x as fast as 4 x 192 on a 2-core CPU
WIDTHS = (
    *range(16, 128, 16),
    *range(128, 256, 32),
    *range(256, 2049, 64),
    *range(2176, 4097, 128),
    *range(4352, 12_289, 256),
)


class ModelConfig(Record):
    """A decoder-only transformer with RoPE, RMSNorm, SwiGLU and grouped queries."""

    architectures: tuple[str, ...] = ("LlamaForCausalLM",)
    model_type: Literal["llama"] = "llama"
    vocab_size: int = Field(default=BYTES, ge=2, le=4_194_304)
    hidden_size: int = Field(ge=16, le=16_384)
    intermediate_size: int = Field(ge=16, le=65_536)
    num_hidden_layers: int = Field(ge=1, le=256)
    num_attention_heads: int = Field(ge=1, le=256)
    num_key_value_heads: int = Field(ge=1, le=256)
    max_position_embeddings: int = Field(ge=2, le=1_048_576)  # the context, in tokens
    rms_norm_eps: float = Field(default=1e-5, gt=0)
    rope_theta: float = Field(default=10_000.0, gt=0)
    hidden_act: Literal["silu"] = "silu"
    tie_word_embeddings: bool = True
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    bos_token_id: int = Field(default=SEPARATOR_BYTE, ge=0)
    eos_token_id: int = Field(default=SEPARATOR_BYTE, ge=0)
    torch_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    tokenizer_digest: str = ""  # SHA-256 of the tokenizer.json it was trained with; "": bytes

    @model_validator(mode="after")
    def _divides(self) -> ModelConfig:
        if self.hidden_size % self.num_attention_heads or self.head_size % 2:
            raise ValueError("hidden_size must be an even multiple of num_attention_heads")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if max(self.bos_token_id, self.eos_token_id) >= self.vocab_size:
            raise ValueError("bos_token_id and eos_token_id must be tokens of the vocabulary")
        return self

    @property
    def head_size(self) -> int:
        """Return the width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def context(self) -> int:
        """Return the maximum number of tokens the model attends to."""
        return self.max_position_embeddings

    @property
    def separator(self) -> int:
        """Return the token before and after each document."""
        return self.bos_token_id


# model_type of transformers' decoders → its class
FAMILIES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
}
BY_LENGTH = ("dynamic", "longrope")  # rope_type whose frequencies follow the highest position
BACKWARD = 2.0  # times the arithmetic of a forward pass


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder from which parameters, arithmetic and memory follow."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    context: int
    tied: bool = True
    gated: bool = True

    @classmethod
    def of(cls, config: ModelConfig) -> ModelShape:
        """Return the shape of one of our models."""
        return cls.read(vars(config), "model config")

    @classmethod
    def read(cls, raw: Mapping[str, Any], where: Path | str) -> ModelShape:
        """Return the shape that a ``config.json`` describes, ours or of one of ``FAMILIES``.

        Raises InvalidInput for other families, and where a size is missing.
        """
        family = raw.get("model_type", "llama")
        if family not in FAMILIES:
            raise InvalidInput(
                "sizes of this model family are not known",
                got=f"model_type {short_repr(family)}",
                wanted=f"one of {', '.join(FAMILIES)}",
                where=where,
            )

        def size(key: str, otherwise: int | None = None) -> int:
            value = raw.get(key)
            value = otherwise if value is None else value
            if type(value) is not int or value < 1:
                raise InvalidInput(
                    "model config lacks a size", got=f"{key} = {value!r}", wanted="1 or more",
                    where=where,
                )  # fmt: skip
            return value

        width, heads = size("hidden_size"), size("num_attention_heads")
        return cls(
            width=width,
            layers=size("num_hidden_layers"),
            heads=heads,
            kv_heads=size("num_key_value_heads", heads),
            head_size=size("head_dim", width // heads),
            feed_forward=size("intermediate_size"),
            vocabulary=size("vocab_size"),
            context=size("max_position_embeddings"),
            tied=ties_embeddings(raw),
            gated=family != "gpt_neox",
        )

    @property
    def block(self) -> int:
        """Return the weights of one block's matrices."""
        attention = 2 * self.width * self.head_size * (self.heads + self.kv_heads)
        return attention + (3 if self.gated else 2) * self.width * self.feed_forward

    @property
    def embedding(self) -> int:
        """Return the weights of the embedding, which are those of the output layer where tied."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """Return the number of weights: exact for Llama's architecture; elsewhere without biases
        and further norms, less than 0.1 % of a model above 1 G parameters."""
        norms = (2 * self.layers + 1) * self.width
        return self.embedding * (1 if self.tied else 2) + self.layers * self.block + norms

    def block_flops(self, context: int) -> float:
        """Return the FLOPs of one token's forward pass through one block."""
        return 2.0 * (self.block + 2 * self.heads * self.head_size * context)

    @property
    def output_flops(self) -> float:
        """Return the FLOPs of one token's logits, forward."""
        return 2.0 * self.embedding

    def flops_per_token(self, context: int | None = None) -> float:
        """Return the FLOPs of one token's forward and backward pass at ``context`` tokens.

        Counted as in PaLM (arXiv 2204.02311, appendix B): two operations per weight of each matrix
        product and token, attention over all that a token may see (the context, or its document
        where documents are separated) without the discount for causality, and backward twice as
        much as forward. Recomputation for activation checkpointing does not count: it is no
        progress. Embedding look-ups and norms are left out.
        """
        blocks = self.layers * self.block_flops(context or self.context)
        return (1 + BACKWARD) * (blocks + self.output_flops)


def count_parameters(config: ModelConfig) -> int:
    """Return the exact number of weights of a model of this shape (a tied embedding once)."""
    return ModelShape.of(config).parameters


def config_for(
    parameters: int,
    context: int,
    vocabulary: int = BYTES,
    *,
    tied: bool = True,
    parts: int = 1,
    stages: int = 1,
    separator: int = SEPARATOR_BYTE,
    tokenizer_digest: str = "",
) -> ModelConfig:
    """Return the configuration whose size is nearest ``parameters`` (within a few percent from 50 k
    up).

    ``parts``: the degree of tensor parallelism; heads and widths are divisible by it. ``stages``:
    the number of pipeline stages; there are at least as many layers. ``separator`` is the token
    between documents. Raises InvalidInput outside 10 k to 100 G parameters, for a context under two
    tokens, a vocabulary that alone is larger than the model, or more parts than a model of this
    size has.
    """
    if not SMALLEST <= parameters <= LARGEST:
        raise InvalidInput(
            "model size out of range",
            got=parameters,
            wanted=f"{SMALLEST} to {LARGEST} parameters",
            do="Change model.parameters in the profile.",
        )
    if context < 2:
        raise InvalidInput("context too short", got=context, wanted="at least 2 tokens")
    shared: dict[str, Any] = {
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
        "bos_token_id": separator,
        "eos_token_id": separator,
        "tokenizer_digest": tokenizer_digest,
    }
    sizes = [
        _sizes(width, layers, head, parts)
        for width in WIDTHS
        if (head := _head_size(width, parts))
        for layers in _near(width, stages)
    ]
    nearest = min(sizes, key=lambda each: _distance(shared | each, parameters), default=None)
    best = None if nearest is None else ModelConfig.model_validate(shared | nearest)
    cut = parts * stages > 1
    if best is None or (cut and abs(math.log(count_parameters(best) / parameters)) > 0.5):
        raise InvalidInput(
            "model is too small to be cut into so many parts",
            got=f"{parameters} parameters, {parts} parts, {stages} stages",
            wanted="heads for each part and a layer for each stage",
            do="Raise model.parameters, or lower training.mesh.tp or pp.",
        )
    if count_parameters(best) > 2 * parameters:
        raise InvalidInput(
            "vocabulary is too large for the model",
            got=f"{vocabulary} tokens take {best.hidden_size * vocabulary} parameters at least",
            wanted=f"a model of {parameters} parameters",
            do="Raise model.parameters, or use a tokenizer with fewer tokens.",
        )
    return best


USER_CODE: Final = "paceline-user-code"


class UserCodeConfig(Record):
    """What builds a module of a user's own again: ``config.json`` of its export.

    The code itself is not in the export: ``code_ref`` names and pins it. The other fields but the
    last two are those of the ``Task`` that the training passed to it.
    """

    model_type: Literal["paceline-user-code"] = USER_CODE
    code_ref: str
    seed: int = Field(ge=-(2**63), lt=2**64)
    parameters: int = Field(ge=1, le=10**13)  # as asked for
    max_position_embeddings: int = Field(ge=1, le=1_048_576)  # tokens of a row
    vocab_size: int = Field(ge=2, le=4_194_304)
    bos_token_id: int = Field(ge=0)  # between documents
    tokenizer_digest: str = ""  # SHA-256 of its tokenizer.json; "": bytes


class HasVocabulary(Protocol):
    """The part of a model's description that ``require_tokenizer`` needs."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def tokenizer_digest(self) -> str: ...


def require_context(config: Mapping[str, Any], context: int, where: Path) -> None:
    """Raise InvalidInput where rows of ``context`` tokens are longer than ``config``, the
    config.json in ``where``, has positions for.

    With longrope, beyond the window of before also the first tokens turn by other frequencies as
    soon as one document of what a rank computes at once is longer: losses would depend on the mesh,
    on microbatches and on packing.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    # one for all layers, or one for each kind of layer
    kinds = (rope, *rope.values()) if isinstance(rope, Mapping) else ()
    key = "original_max_position_embeddings"
    limits = {"max_position_embeddings": config.get("max_position_embeddings")}
    for each in kinds:
        if isinstance(each, Mapping) and "longrope" in (each.get("rope_type"), each.get("type")):
            limits[f"{key} of rope_type longrope"] = config.get(key) or each.get(key)
    for name, most in limits.items():
        if isinstance(most, int) and context > most:
            raise InvalidInput(
                "rows are longer than the model's context",
                got=f"{context} tokens",
                wanted=f"at most {most} ({name})",
                where=where,
                do=f"Set model.context: --set model.context={most}",
            )


def require_tokenizer(config: HasVocabulary, tokenizer_digest: str, vocabulary: int) -> None:
    """Raise InvalidInput unless the model can read data of this tokenizer.

    ``tokenizer_digest`` is "" for bytes.
    """
    if config.tokenizer_digest != tokenizer_digest:
        raise InvalidInput(
            "data and model have different tokenizers",
            got=f"data of {_tokenizer(tokenizer_digest)}",
            wanted=f"{_tokenizer(config.tokenizer_digest)}, as the model was trained with",
            do="Build the snapshot with the model's tokenizer.json, or take another base model.",
        )
    if vocabulary > config.vocab_size:
        raise InvalidInput(
            "the tokenizer has more tokens than the model",
            got=f"{vocabulary} tokens, with one that ends a document",
            wanted=f"{config.vocab_size} at most, the rows of the model's embedding",
            do="Name the token that ends a document <|endoftext|> or [EOS] in tokenizer.json if it "
            "has another name, or enlarge the model: resize_token_embeddings of transformers.",
        )


def _tokenizer(digest: str) -> str:
    return f"tokenizer {digest[:16]}" if digest else "bytes"


def _near(width: int, least: int) -> range:
    usual = max(1, round(width / WIDTH_PER_LAYER))
    start = max(2, usual // 2, least)  # one block alone cannot copy from its context
    return range(start, max(usual + 3, start + 1))


def _head_size(width: int, parts: int) -> int | None:
    """Return the largest usual head size such that ``width`` splits into ``parts`` of whole heads.

    Returns None if there is none. To fit parts, heads shrink to half their usual size at most:
    smaller ones learn worse.
    """
    usual = [size for size, least in ((128, 2176), (64, 256), (32, 128), (16, 0)) if width >= least]
    smallest = 16 if parts == 1 else usual[0] // 2
    fitting = (each for each in usual if each >= smallest and width % (each * parts) == 0)
    return next(fitting, None)


def _sizes(width: int, layers: int, head: int, parts: int) -> dict[str, int]:
    heads = width // head
    # Grouped queries pay off with many heads; with fewer, full heads learn better.
    grouped = heads >= 8 and heads % 4 == 0 and (heads // 4) % parts == 0
    step = math.lcm(16, parts)
    return {
        "hidden_size": width,
        "intermediate_size": math.ceil(8 * width / 3 / step) * step,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4 if grouped else heads,
    }


def _distance(raw: Mapping[str, Any], parameters: int) -> float:
    shape = ModelShape.read(raw, "model config")
    size = abs(math.log(shape.parameters / parameters))
    aspect = abs(math.log(shape.width / shape.layers / WIDTH_PER_LAYER))
    return size + 0.1 * aspect
