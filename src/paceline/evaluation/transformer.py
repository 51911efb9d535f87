"""Score a transformer: bits per held-out document, and the latency of one forward pass.

A model reads text by its own tokenizer. Every token is predicted exactly once, from the separator
and at least a quarter of a context before it (all there is, near a document's start). Because all
models predict the same text, Σ bits / Σ bytes compares them whatever their tokens are. Computes no
statistics and reads only the model's files.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from paceline.data import Tokenizer, open_tokenizer
from paceline.errors import CorruptData, InvalidInput
from paceline.models import (
    TOKENIZER_FILE,
    is_pretrained,
    require_tokenizer,
    weight_files,
    weights_digest,
)

if TYPE_CHECKING:
    from torch import Tensor

Reals = NDArray[np.float64]
Tokens = NDArray[np.int64]

TOKENS_PER_BATCH = 4096  # at most; 4 MiB of logits in float32 with a vocabulary of 256
LOGITS_BYTES = 512 * 1024 * 1024  # at most, of all threads together
MAX_CONTEXT = 1024  # tokens of a row of a model of others: theirs may be a million
LATENCY_RUNS = 7
FORMAT = "safetensors"  # ``weight_files`` refuses every other


@dataclass(frozen=True, kw_only=True)
class TransformerScore:
    """Bits per document, and facts about serving."""

    bits: Reals  # one figure a document
    latency_ms: float
    dtype: str
    model_bytes: int
    weights_digest: str
    tokens: int
    format: str = FORMAT


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """A model, and how it reads text."""

    forward: Callable[[Tensor], Tensor]  # tokens_BT → logits_BTV
    tokenizer: Tokenizer
    vocabulary: int  # rows of the embedding
    separator: int  # before a document's first token, as in training
    context: int
    dtype: str  # of the files

    @property
    def rows(self) -> int:
        """Return how many rows of a whole context are predicted at once, by each thread."""
        row_bytes = 4 * self.vocabulary * self.context
        return max(1, min(TOKENS_PER_BATCH // self.context, LOGITS_BYTES // (4 * row_bytes)))

    def threads(self, cores: int) -> int:
        """Return how many threads keep the logits within their limit."""
        return max(1, min(cores, LOGITS_BYTES // (4 * self.vocabulary * self.context * self.rows)))


@dataclass(frozen=True)
class Window:
    """Inputs [start, end) of one document's tokens, of which targets [fresh, end) are scored."""

    document: int
    start: int
    fresh: int
    end: int


def windows(length: int, context: int, document: int = 0) -> list[Window]:
    """Return windows that score each of ``length`` tokens once, advancing by 3/4 of a context.

    Half a context would give 1 % better figures here for 1.5 times the work.
    """
    advance = max(1, 3 * context // 4)
    found = [Window(document, 0, 0, min(context, length))]
    while (last := found[-1].end) < length:
        end = min(last + advance, length)
        found.append(Window(document, max(0, end - context), last, end))
    return found


def score_transformer(
    directory: Path,
    texts: Sequence[bytes],
    on_progress: Callable[[float], None],
    tokenizer: Tokenizer | None = None,
) -> TransformerScore:
    """Return how well the model in ``directory`` predicts ``texts``.

    ``tokenizer`` is that of the data, for a model that was trained with it and has no copy. Raises
    CorruptData where its predictions are not finite, InvalidInput where it is not in safetensors,
    or its tokenizer is not here, does not fit it, or does not keep the text.
    """
    files = weight_files(directory)
    reader = _open(directory, tokenizer)
    tokens = [_encoded(reader, text, directory) for text in texts]
    with _one_core_an_operation() as cores:
        latency_ms = _latency_ms(reader)
        bits_D = _bits(reader, tokens, on_progress, directory, reader.threads(cores))
    return TransformerScore(
        bits=bits_D,
        latency_ms=latency_ms,
        dtype=reader.dtype,
        model_bytes=sum(path.stat().st_size for path in files),
        weights_digest=weights_digest(directory),
        tokens=sum(map(len, tokens)),
    )


def _open(directory: Path, of_the_data: Tokenizer | None) -> _Reader:
    path = directory / TOKENIZER_FILE
    own = open_tokenizer(str(path)) if path.is_file() else None
    if is_pretrained(directory):
        from paceline.models import Pretrained

        found = Pretrained.open(directory)
        found.require_sound()
        tokenizer = own or open_tokenizer("bytes")
        require_tokenizer(found, tokenizer.digest, tokenizer.vocabulary.vocab_size)
        return _Reader(
            forward=found.load(),
            tokenizer=tokenizer,
            vocabulary=found.vocab_size,
            separator=tokenizer.vocabulary.separator,
            context=min(found.longest_context, MAX_CONTEXT),
            dtype=str(found.dtype).removeprefix("torch."),
        )
    from paceline.models import load_model

    model, config = load_model(directory)
    tokenizer = own or of_the_data or open_tokenizer("bytes")
    if not config.tokenizer_digest:
        tokenizer = open_tokenizer("bytes")
    require_tokenizer(config, tokenizer.digest, tokenizer.vocabulary.vocab_size)
    return _Reader(
        forward=model.eval(),
        tokenizer=tokenizer,
        vocabulary=config.vocab_size,
        separator=config.separator,
        context=config.context,
        dtype=config.torch_dtype,
    )


def _encoded(reader: _Reader, text: bytes, directory: Path) -> Tokens:
    """Return the tokens of ``text``; raises InvalidInput where they do not say all of it."""
    try:
        (tokens,) = reader.tokenizer.encode([text])
        problem = tokens if isinstance(tokens, str) else ""
    except UnicodeDecodeError as error:
        tokens, problem = "", f"the text is not UTF-8: {error.reason} at byte {error.start}"
    if isinstance(tokens, str):
        raise InvalidInput(
            "text cannot be tokenised", got=problem, where=directory, do="Leave it out of the data."
        )
    back = reader.tokenizer.text(tokens)
    # Many tokenizers compose characters first (NFC), which changes no character.
    if back != text and back != normalize("NFC", text.decode()).encode():
        shared = min(len(text), len(back))
        at = next((n for n in range(shared) if text[n] != back[n]), shared)
        raise InvalidInput(
            "the model's tokenizer does not keep the text, so that its figures compare with none",
            got=f"{back[at : at + 20]!r} at byte {at} of a document",
            wanted=f"{text[at : at + 20]!r}",
            where=directory,
        )
    return tokens.astype(np.int64)


def _bits(
    reader: _Reader,
    targets: Sequence[Tokens],
    on_progress: Callable[[float], None],
    directory: Path,
    threads: int,
) -> Reals:
    import torch

    inputs = [np.concatenate([[reader.separator], each[:-1]]) for each in targets]
    todo = [
        each
        for number, tokens in enumerate(targets)
        for each in windows(len(tokens), reader.context, number)
    ]
    todo.sort(key=lambda each: each.end - each.start)  # so that batches have little padding
    batches = [todo[start : start + reader.rows] for start in range(0, len(todo), reader.rows)]
    bits_D = np.zeros(len(targets))

    def predict(batch: Sequence[Window]) -> NDArray[np.float64]:
        with torch.inference_mode():  # a thread-local setting
            return _nats(reader, batch, inputs, targets)

    with ThreadPoolExecutor(threads) as pool:
        for done, (batch, nats_BT) in enumerate(
            zip(batches, pool.map(predict, batches), strict=True), start=1
        ):
            for row, window in zip(nats_BT, batch, strict=True):
                fresh = row[window.fresh - window.start : window.end - window.start]
                bits_D[window.document] += float(fresh.sum()) / np.log(2)
            on_progress(done / len(batches))
    if not np.isfinite(bits_D).all():
        raise CorruptData(
            "the model's predictions are not finite",
            got=f"NaN or infinity in {int((~np.isfinite(bits_D)).sum())} documents",
            wanted="probabilities",
            where=directory,
        )
    return bits_D


def _nats(
    reader: _Reader, group: Sequence[Window], inputs: Sequence[Tokens], targets: Sequence[Tokens]
) -> NDArray[np.float64]:
    import torch
    import torch.nn.functional as F  # noqa: N812 - the field's name for it

    longest = max(window.end - window.start for window in group)
    # Padding is at the end of each row; causal attention keeps it out of everything that is scored.
    tokens_BT = np.full((len(group), longest), reader.separator, dtype=np.int64)
    wanted_BT = np.zeros((len(group), longest), dtype=np.int64)
    for row, window in enumerate(group):
        length = window.end - window.start
        tokens_BT[row, :length] = inputs[window.document][window.start : window.end]
        wanted_BT[row, :length] = targets[window.document][window.start : window.end]
    logits_BTV = reader.forward(torch.from_numpy(tokens_BT)).float()
    nats = F.cross_entropy(
        logits_BTV.flatten(0, 1), torch.from_numpy(wanted_BT).flatten(), reduction="none"
    )
    found: NDArray[np.float64] = nats.view(len(group), longest).double().numpy()
    return found


@contextmanager
def _one_core_an_operation() -> Iterator[int]:
    """Yield the number of cores, with torch limited to one thread per operation.

    Threads then work on separate batches. Multi-threaded operations wait for the slowest core at
    every step: on a busy machine that made one forward pass of a 2 M model 1,157 ms instead of 22.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield len(os.sched_getaffinity(0))
    finally:
        torch.set_num_threads(before)


def _latency_ms(reader: _Reader) -> float:
    import torch

    tokens_BT = torch.full((1, reader.context), reader.separator, dtype=torch.int64)
    seconds = []
    with torch.inference_mode():
        for _ in range(LATENCY_RUNS):
            began = time.perf_counter()
            reader.forward(tokens_BT)
            seconds.append(time.perf_counter() - began)
    return 1000 * statistics.median(seconds[1:])  # the first one warms up
