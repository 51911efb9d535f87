"""Small random models, a tokenizer and a chat template, written by transformers itself."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import torch
import transformers

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": 255,
    "eos_token_id": 255,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LAYERS = ["sliding_attention", "full_attention"]
WINDOW = 6  # tokens: shorter than the tests' documents
# family → its config class and what differs from SHAPE (None: the config has no such setting)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        {"sliding_window": WINDOW, "layer_types": LAYERS, "query_pre_attn_scalar": 8},
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {"sliding_window": WINDOW, "layer_types": LAYERS, "query_pre_attn_scalar": 8},
    ),
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": None, "head_dim": None}),
}
CHAT_TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
_ASSISTANT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + _ASSISTANT
)
# The same, with what an assistant says marked, as transformers wants it for its mask.
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    + _ASSISTANT
)


def write_model(family: str, directory: Path, *, shard: str = "1GB", **changes: Any) -> Path:
    """Save a random model of ``family``; ``shard`` is the greatest size of a weights file."""
    name, own = FAMILIES[family]
    settings = {k: v for k, v in (SHAPE | own | changes).items() if v is not None}
    dtype = settings.pop("dtype", torch.float32)
    config = getattr(transformers, name)(**settings)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for each in model.parameters():  # norms and biases of a trained model are not 0 and 1
            if each.ndim == 1:
                each.add_(torch.randn_like(each) * 0.1)
    model.to(dtype).save_pretrained(directory, max_shard_size=shard)
    return directory


def write_tokenizer(
    directory: Path,
    texts: Sequence[str],
    vocabulary: int = 300,
    *,
    template: str | None = CHAT_TEMPLATE,
    end: str = "<|endoftext|>",
    begin: str | None = None,
) -> Path:
    """Save a byte-pair tokenizer trained on ``texts``, with a chat template.

    ``end``: the token that ends what an assistant says, in ``CHATML`` "<|im_end|>". ``begin``: the
    token that its post-processor puts before a text (BOS), the first of the vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[
            *([] if begin is None else [begin]),
            "<|endoftext|>",
            *([] if end == "<|endoftext|>" else ["<|im_start|>", end]),
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    if begin is not None:
        made.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, 0)]
        )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=end, bos_token=begin, chat_template=template
    )
    fast.save_pretrained(directory)
    return directory


def change_config(directory: Path, **changes: object) -> None:
    """Change keys of the model's config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write the tensors of the model's one file again, as ``change`` leaves them."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def losses_of_plain_steps(
    directory: Path, examples: Sequence[tuple[list[int], list[int]]], rates: Sequence[float]
) -> list[float]:
    """Return the losses of a plain loop of transformers, a step for each rate: of all ``examples``
    (ids, and labels of -100 where none counts), each by itself, averaged over what counts."""
    counted = sum(sum(label != -100 for label in labels[1:]) for _, labels in examples)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(
        [
            {"params": [each for each in model.parameters() if each.ndim >= 2]},
            {"params": [each for each in model.parameters() if each.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    losses = []
    for rate in rates:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = 0.0
        for ids, labels in examples:
            mine = sum(each != -100 for each in labels[1:])
            mean = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
            (mean * mine / counted).backward()
            loss += float(mean.detach()) * mine / counted
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss)
    return losses
