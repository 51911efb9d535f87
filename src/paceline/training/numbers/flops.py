"""Floating-point operations of a transformer, and the most that this device can do: MFU's halves.

Counted as in PaLM (arXiv 2204.02311, appendix B): two operations a weight of each matrix product
and token, attention over all that a token may see (the context, or its document where documents are
apart) without the discount for causality, and backward twice as much as forward. What is recomputed
for activation checkpointing does not count: it is no progress. Embedding look-ups and norms are
left out.
"""

from __future__ import annotations

import functools
import time

import torch

from paceline.models import ModelConfig

BACKWARD = 2.0  # times forward
_MATRIX = {"cpu": 768, "cuda": 8192}  # large enough for the peak, small enough for a moment
_SECONDS = 0.1


def flops_per_token(config: ModelConfig, context: int | None = None) -> float:
    """Return the operations of one token's forward and backward pass at ``context`` tokens."""
    width, heads = config.hidden_size, config.num_attention_heads
    kv_width = config.head_size * config.num_key_value_heads
    layer = 2 * width * width + 2 * width * kv_width + 3 * width * config.intermediate_size
    weights = config.num_hidden_layers * layer + config.vocab_size * width
    seen = config.context if context is None else context
    attention = config.num_hidden_layers * 2 * heads * config.head_size * seen
    return (1 + BACKWARD) * 2.0 * (weights + attention)


@functools.cache
def matmul_peak(device_type: str, dtype: torch.dtype, threads: int) -> float:
    """Return the most operations a second that matrix products of ``dtype`` reach here.

    Measured once a process for each device, type and number of threads, in about 0.1 s: the best of
    repeated products of square matrices.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _best(device_type, dtype)
    finally:
        torch.set_num_threads(before)


def _best(device_type: str, dtype: torch.dtype) -> float:
    device = torch.device(device_type)
    size = _MATRIX.get(device_type, 1024)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    operations = 2.0 * size**3
    best = 0.0
    until = time.perf_counter() + _SECONDS
    rounds = 0
    while rounds < 3 or time.perf_counter() < until:
        _finish(device)
        started = time.perf_counter()
        torch.mm(left, right)
        _finish(device)
        best = max(best, operations / (time.perf_counter() - started))
        rounds += 1
    return best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
