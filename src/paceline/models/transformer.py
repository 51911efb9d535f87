"""A byte-level decoder-only transformer, whole in one process: no parallelism inside.

Shapes in names: B batch, T time (bytes), D width, H heads, K key-value heads, E head size, V
vocabulary (256). Modules carry Llama's names, so that ``state_dict`` keys are the ones other tools
know. Sources: RoPE (arXiv 2104.09864), RMSNorm (1910.07467), SwiGLU (2002.05202), GQA (2305.13245).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

from paceline.models.config import ModelConfig

INITIAL_STD = 0.02


class RMSNorm(nn.Module):
    """Scale each vector to unit root mean square, then by a learned weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.rms_norm(x_BTD, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; query heads may share a key-value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_size = config.head_size
        width, kv_width = config.hidden_size, self.kv_heads * self.head_size
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        b, t, d = x_BTD.shape
        q_BHTE = self.q_proj(x_BTD).view(b, t, self.heads, self.head_size).transpose(1, 2)
        k_BKTE = self.k_proj(x_BTD).view(b, t, self.kv_heads, self.head_size).transpose(1, 2)
        v_BKTE = self.v_proj(x_BTD).view(b, t, self.kv_heads, self.head_size).transpose(1, 2)
        q_BHTE, k_BKTE = rotate(q_BHTE, cos_TE, sin_TE), rotate(k_BKTE, cos_TE, sin_TE)
        out_BHTE = F.scaled_dot_product_attention(
            q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        out: Tensor = self.o_proj(out_BHTE.transpose(1, 2).reshape(b, t, d))
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
    """Attention, then feed-forward, each on a normalised input and added back."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_TE, sin_TE)
        mixed: Tensor = self.mlp(self.post_attention_layernorm(x_BTD))
        return x_BTD + mixed


class Decoder(nn.Module):
    """Embedding, blocks and the last norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class ByteTransformer(nn.Module):
    """The model: bytes in, logits of the next byte out."""

    cos_TE: Tensor  # noqa: N815 - tensors carry shape letters
    sin_TE: Tensor  # noqa: N815

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        cos_TE, sin_TE = rotary_tables(config)
        self.register_buffer("cos_TE", cos_TE, persistent=False)
        self.register_buffer("sin_TE", sin_TE, persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return logits_BTV for tokens_BT (integers 0 to 255, T ≤ the context)."""
        t = tokens_BT.shape[1]
        assert t <= self.config.context, "callers cut their text to the context"
        cos_TE, sin_TE = self.cos_TE[:t], self.sin_TE[:t]
        x_BTD = self.model.embed_tokens(tokens_BT)
        for block in self.model.layers:
            x_BTD = block(x_BTD, cos_TE, sin_TE)
        logits_BTV: Tensor = F.linear(self.model.norm(x_BTD), self.model.embed_tokens.weight)
        return logits_BTV


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return cos_TE and sin_TE; computed in float64, so that every machine gets the same table."""
    half = config.head_size // 2
    frequency_E = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle_TE = torch.outer(torch.arange(config.context, dtype=torch.float64), frequency_E)
    angle_TE = torch.cat([angle_TE, angle_TE], dim=-1)
    return angle_TE.cos().float(), angle_TE.sin().float()


def rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Return ``x_BHTE`` turned by its position (the two halves of a head are the two axes)."""
    low, high = x_BHTE.chunk(2, dim=-1)
    cos_TE, sin_TE = cos_TE.to(x_BHTE.dtype), sin_TE.to(x_BHTE.dtype)
    return x_BHTE * cos_TE + torch.cat([-high, low], dim=-1) * sin_TE


def new_model(config: ModelConfig, seed: int) -> ByteTransformer:
    """Return a freshly initialised model; the same seed gives the same bits."""
    with torch.device("meta"):  # skips torch's own initialisation, which draws from the global RNG
        model = ByteTransformer(config)
    model.to_empty(device="cpu")
    model.cos_TE, model.sin_TE = rotary_tables(config)
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
    return model
