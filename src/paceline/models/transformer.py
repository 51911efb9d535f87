"""A decoder-only transformer, whole or a pipeline stage of it; contains no communication.

Shape letters: B batch, T time (tokens), D width, H heads, K key-value heads, E head size, V
vocabulary. Modules have Llama's names, so that ``state_dict`` keys are the ones other tools expect;
a stage keeps the whole model's names. Sources: RoPE (arXiv 2104.09864), RMSNorm (1910.07467),
SwiGLU (2002.05202), GQA (2305.13245). ``attention`` has the masks.

``attend_over_rows`` is for processes that have a part of every row each, of P parts: before
attention a process gives its tokens' heads away and gets some heads of all tokens
(``RowExchange``); attention runs as ever, with the masks of whole rows, and its result goes back.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from paceline.models.attention import AttentionScope, KeptKeys, attend, attention_scope
from paceline.models.config import ModelConfig
from paceline.models.transformers_attention import exchange_parts

INITIAL_STD = 0.02
Rotation = tuple[Tensor, Tensor]  # cos and sin, (T or more, E) or (B, 1, T, E)
KeyValueCache = dict[str, KeptKeys]  # by layer


class RMSNorm(nn.Module):
    """Scale each vector to unit root mean square, then by a learned weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.rms_norm(x_BTD, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; query heads may share a key-value head.

    With an ``exchange`` the tokens are a part of a row, and ``seen`` is that of whole rows.
    """

    exchange: RowExchange | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        width, kv_width = config.hidden_size, config.num_key_value_heads * self.head_size
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: Tensor, rotation: Rotation, seen: AttentionScope) -> Tensor:
        b, t, _ = x_BTD.shape
        # The number of heads follows from the projections: a rank may hold only some of them.
        q_BHTE = self.q_proj(x_BTD).view(b, t, -1, self.head_size).transpose(1, 2)
        k_BKTE = self.k_proj(x_BTD).view(b, t, -1, self.head_size).transpose(1, 2)
        v_BKTE = self.v_proj(x_BTD).view(b, t, -1, self.head_size).transpose(1, 2)
        q_BHTE, k_BKTE = rotate(q_BHTE, rotation), rotate(k_BKTE, rotation)
        if self.exchange is not None:
            q_BHTE, k_BKTE, v_BKTE = map(self.exchange.to_rows, (q_BHTE, k_BKTE, v_BKTE))
        out_BHTE = attend(q_BHTE, k_BKTE, v_BKTE, seen)
        if self.exchange is not None:
            out_BHTE = self.exchange.to_parts(out_BHTE)
        out: Tensor = self.o_proj(out_BHTE.transpose(1, 2).reshape(b, t, -1))
        return out


class FeedForward(nn.Module):
    """SwiGLU: a gated linear unit with SiLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return out


class Block(nn.Module):
    """Attention, then feed-forward, each with pre-normalisation and a residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x_BTD: Tensor, rotation: Rotation, seen: AttentionScope) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rotation, seen)
        mixed: Tensor = self.mlp(self.post_attention_layernorm(x_BTD))
        return x_BTD + mixed


class Decoder(nn.Module):
    """Embedding, blocks and the last norm, or those of them that a stage has.

    ``layers`` is keyed by each block's index in the whole model.
    """

    def __init__(self, config: ModelConfig, layers: range, embedding: bool, head: bool) -> None:
        super().__init__()
        if embedding or (head and config.tie_word_embeddings):
            # Not nn.Embedding(…): its initialisation imports torch's compiler on the meta device,
            # which takes 2 s; ``initialise`` and ``load_model`` set the values.
            empty_VD = torch.empty(config.vocab_size, config.hidden_size)
            self.embed_tokens = nn.Embedding.from_pretrained(  # type: ignore[no-untyped-call]
                empty_VD, freeze=False
            )
        self.layers = nn.ModuleDict({str(number): Block(config) for number in layers})
        if head:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class TiedHead(nn.Module):
    """Logits from the embedding's weight; has no weight of its own."""

    def forward(self, x_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        return F.linear(x_BTD, weight_VD)


class Transformer(nn.Module):
    """The model: tokens in, logits of the next token out.

    A pipeline stage takes the previous stage's x_BTD instead of tokens unless it has the embedding,
    and returns x_BTD instead of logits unless it has the head.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: range | None = None,
        *,
        embedding: bool = True,
        head: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        self.has_embedding, self.has_head = embedding, head
        if layers is None:
            layers = range(config.num_hidden_layers)
        self.model = Decoder(config, layers, embedding, head)
        if head and config.tie_word_embeddings:
            self.tied_head = TiedHead()
        elif head:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._tables: dict[torch.device, Rotation] = {}

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Return logits_BTV for tokens_BT (integers, T ≤ the context).

        ``positions_BT``: of each token, by default 0 to T - 1; may exceed the context. Tokens of
        different ``documents_BT`` do not attend to each other. For a stage see the class.
        With a ``cache`` (``new_cache``) the tokens follow those of the calls before, up to the
        context together; positions and documents are then left out.
        """
        x_BTD = self.model.embed_tokens(tokens_BT) if self.has_embedding else tokens_BT
        rotation = self._rotation(positions_BT, x_BTD.device)
        seen = attention_scope(documents_BT)
        if cache:
            assert positions_BT is None and documents_BT is None, "positions are the cache's"
            cos_TE, sin_TE = rotation
            before = next(iter(cache.values())).length
            rotation = cos_TE[before:], sin_TE[before:]
        for number, block in self.model.layers.items():
            x_BTD = block(x_BTD, rotation, cache[number] if cache else seen)
        if not self.has_head:
            return x_BTD
        x_BTD = self.model.norm(x_BTD)
        if self.config.tie_word_embeddings:
            logits_BTV: Tensor = self.tied_head(x_BTD, self.model.embed_tokens.weight)
        else:
            logits_BTV = self.lm_head(x_BTD)
        return logits_BTV

    def new_cache(self) -> KeyValueCache:
        """Return an empty cache of keys and values, for one batch of rows that grow."""
        return {number: KeptKeys(self.config.context) for number in self.model.layers}

    def stage(self, layers: range, *, embedding: bool, head: bool) -> Transformer:
        """Return blocks ``layers`` as a separate model that shares this one's weights."""
        with torch.device("meta"):
            part = Transformer(self.config, range(0), embedding=embedding, head=head)
        for number in layers:
            part.model.layers[str(number)] = self.model.layers[str(number)]
        for name in ("embed_tokens", "norm"):
            if hasattr(part.model, name):
                setattr(part.model, name, getattr(self.model, name))
        if hasattr(part, "lm_head"):
            part.lm_head = self.lm_head
        return part.train(self.training)

    def _rotation(self, positions_BT: Tensor | None, device: torch.device) -> Rotation:
        if positions_BT is not None:
            cos_BTE, sin_BTE = rotation_at(positions_BT, self.config)
            return cos_BTE[:, None], sin_BTE[:, None]
        found = self._tables.get(device)
        if found is None:
            with torch.inference_mode(False):  # the same table is used for training later
                positions_T = torch.arange(self.config.context, device=device)
                found = self._tables[device] = rotation_at(positions_T, self.config)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": {}}


def rotation_at(positions: Tensor, config: ModelConfig) -> Rotation:
    """Return cos and sin for each position, with one more dimension (E) than ``positions``.

    Computed in float64, so that every machine gets the same values.
    """
    half = config.head_size // 2
    exponent_E = torch.arange(half, dtype=torch.float64, device=positions.device) / half
    angle_TE = positions.double()[..., None] * config.rope_theta**-exponent_E
    angle_TE = torch.cat([angle_TE, angle_TE], dim=-1)
    return angle_TE.cos().float(), angle_TE.sin().float()


def rotate(x_BHTE: Tensor, rotation: Rotation) -> Tensor:
    """Return ``x_BHTE`` rotated by its position (the two halves of a head are the two axes).

    Computed in float32 at least: bfloat16 cannot distinguish positions of a long context.
    """
    half = x_BHTE.shape[-1] // 2  # cos and sin are the same in both halves
    cos, sin = (each[..., : x_BHTE.shape[2], :half] for each in rotation)
    low, high = x_BHTE.to(torch.promote_types(x_BHTE.dtype, cos.dtype)).chunk(2, dim=-1)
    turned = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    return turned.to(x_BHTE.dtype)


def output_layer(model: Any) -> Any:
    """Return the layer that gives the logits, of ours or in transformers' layout; None: unknown."""
    found = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return found or getattr(model, "lm_head", None)


def new_model(config: ModelConfig, seed: int) -> Transformer:
    """Return a freshly initialised model; the same seed gives the same bits."""
    with torch.device("meta"):  # skips torch's own initialisation, which uses the global RNG
        model = Transformer(config)
    model.to_empty(device="cpu")
    initialise(model, config, seed)
    return model


def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Initialise all weights of a whole model from ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    # Projections that write into the residual stream start smaller, by depth (GPT-2's rule).
    residual_std = INITIAL_STD / math.sqrt(2 * config.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = residual_std if writes_residual else INITIAL_STD
                parameter.normal_(0.0, std, generator=generator)


class RowExchange(Protocol):
    """What the processes of one row give each other; part p has tokens p·T/P to (p + 1)·T/P."""

    @property
    def parts(self) -> int:
        """Return P."""
        ...

    def to_rows(self, x_BHTE: Tensor) -> Tensor:
        """Return H/P heads of whole rows, (B, H/P, T, E), of all heads of a part (B, H, T/P, E)."""
        ...

    def to_parts(self, x_BHTE: Tensor) -> Tensor:
        """Return all heads of a part, of H/P heads of whole rows."""
        ...


def attend_over_rows(model: nn.Module, exchange: RowExchange) -> None:
    """Let ``model``, ours or of transformers, take parts of rows: tokens_BT and positions_BT are
    the part's (positions must be given), documents_BT the whole row's, and logits_BTV the part's.
    """
    for each in model.modules():
        each.exchange = exchange  # type: ignore[assignment] # torch: modules and tensors
    if any(isinstance(each, Attention) for each in model.modules()):
        return
    exchange_parts(model)
