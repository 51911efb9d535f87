"""Generate text from a model directory, to look at what was trained.

Keys and values are kept from token to token, one row at a time: to serve many, use vLLM or
transformers, whose layout the directory has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.data import ChatTemplate
from paceline.errors import InvalidInput
from paceline.evaluation.text_model import TextModel
from paceline.models import TOKENIZER_FILE, read_json

if TYPE_CHECKING:
    from torch import Generator, Tensor

GENERATION_CONFIG = "generation_config.json"
UNFINISHED = "\ufffd"  # stands for a character whose last bytes are still to come


def generate(
    model: TextModel,
    prompt: str | list[int],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    chat: bool = False,
    stops: Collection[int] = (),
) -> Iterator[str]:
    """Yield what ``model`` adds to ``prompt``, a text or its tokens, piece by piece; ``chat``: what
    it answers, by its chat template.

    Ends after ``max_tokens`` tokens, with a token that ends documents, or with one of ``stops``.
    ``temperature`` 0 takes the most likely token each time; above, tokens are drawn, the same ones
    for the same ``seed``. The model sees the last tokens that fit its context.
    """
    import torch

    random = torch.Generator().manual_seed(seed)
    ends = _stops(model) | set(stops)
    if not isinstance(prompt, str):
        row = list(prompt)
    else:
        try:
            text = prompt.encode()
        except UnicodeEncodeError as error:  # of a command line in another encoding, say
            raise InvalidInput("the prompt is not UTF-8", got=ascii(prompt)[:200]) from error
        if chat:
            row, end = ChatTemplate(str(model.directory / TOKENIZER_FILE)).prompt(prompt)
            ends |= set() if end is None else {end}
        else:
            row = [model.first, *model.encode(text).tolist()]
    made: list[int] = []
    shown = ""
    next_logits = model.decoder()
    while len(made) < max_tokens:
        with torch.inference_mode():
            logits_V = next_logits(row)
            logits_V[model.tokenizer.vocabulary.vocab_size :] = -torch.inf  # rows without a token
            token = _draw(logits_V, temperature, random)
        if token in ends:
            break
        row.append(token)
        made.append(token)
        found = model.tokenizer.decode(np.array(made))
        if not found.endswith(UNFINISHED):
            yield found[len(shown) :]
            shown = found
    if made and (found := model.tokenizer.decode(np.array(made))) != shown:
        yield found[len(shown) :]


def _draw(logits_V: Tensor, temperature: float, random: Generator) -> int:
    import torch

    if not temperature:
        return int(logits_V.argmax())
    # From the greatest one, in float64: a temperature near 0 is 0 in float32.
    p_V = torch.softmax((logits_V - logits_V.max()).double() / temperature, 0)
    return int(torch.multinomial(p_V, 1, generator=random))


def _stops(model: TextModel) -> set[int]:
    """Return the tokens that end a text: the separator, and those of generation_config.json."""
    path = model.directory / GENERATION_CONFIG
    named = read_json(path).get("eos_token_id") if path.is_file() else None
    ids = named if isinstance(named, list) else [named]
    return {model.separator, *(each for each in ids if isinstance(each, int))}


class PyfuncModel:
    """A published model as ``mlflow.pyfunc.load_model`` returns it."""

    def __init__(self, model: TextModel) -> None:
        self.model = model

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> list[str]:
        """Return what the model adds to each prompt: a text, texts, or a table's first column.

        ``params`` are ``max_tokens`` (default 64), ``temperature``, ``seed`` and ``chat``.
        """
        if hasattr(model_input, "iloc"):
            model_input = model_input.iloc[:, 0]
        prompts = [model_input] if isinstance(model_input, str) else list(model_input)
        given: dict[str, Any] = {"max_tokens": 64} | (params or {})
        return ["".join(generate(self.model, str(each), **given)) for each in prompts]


def _load_pyfunc(path: str) -> PyfuncModel:
    """Return the model in the directory that MLflow has downloaded (MLflow calls this by name)."""
    return PyfuncModel(TextModel.open(Path(path)))
