"""Score a transformer: bits per held-out document, and what it costs to serve it.

A model reads text by its own tokenizer. Every token is predicted exactly once, from the token that
begins a text and at least a quarter of a context before it (all there is, near a document's start).
Because all models predict the same text, Σ bits / Σ bytes compares them whatever their tokens are.
Computes no statistics and reads only the model's files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config import EvaluationSettings
from paceline.data import Tokenizer
from paceline.errors import CorruptData, InvalidInput, PermanentError
from paceline.evaluation.held_out import GROUP, HeldOutDocument
from paceline.evaluation.serving import in_batches, measure_serving, serving_machine, threads_for
from paceline.evaluation.text_model import AllowedCode, Ranks, TextModel, Tokens, UserModel
from paceline.models import weight_files, weights_digest
from paceline.schemas import RecordedScore, Serving, digest_of
from paceline.system import usable_cores

Reals = NDArray[np.float64]
# By tenths of the probability of the most likely token: tokens, how often it was the right one, and
# the sum of those probabilities in millionths. Whole numbers: parts of the text add up exactly.
Bins = tuple[tuple[int, int, int], ...]

# Gets bits of the rows that are done, and facts: see ``score_transformer``.
OnRows = Callable[[Reals, Mapping[str, Any]], None]

BINS = 10
SAVE_EVERY_S = 5.0  # of a model's scoring; an interruption loses at most that and a batch
MILLION = 1_000_000

FORMAT = "safetensors"  # ``weight_files`` refuses every other


@dataclass(frozen=True, kw_only=True)
class TransformerScore:
    """Bits per document, and facts about serving."""

    bits: Reals  # one figure a document
    latency_ms: float  # one forward pass of one context
    serving: Serving
    dtype: str
    model_bytes: int
    weights_digest: str
    tokens: int
    calibration: Bins
    parameters: int
    context: int  # that the model was made for; rows may be shorter
    judged_context: int  # tokens of the longest row
    format: str = FORMAT

    def split(self) -> tuple[Reals, dict[str, Any]]:
        """Return ``bits``, and the other fields: those of a ModelScore."""
        facts = dict(vars(self))
        return facts.pop("bits"), facts


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
    held_out: Sequence[HeldOutDocument],
    on_progress: Callable[[float], None],
    tokenizer: Tokenizer | None = None,
    allowed: AllowedCode | None = None,
    ranks: Ranks | None = None,
    settings: EvaluationSettings | None = None,
    begun: RecordedScore | None = None,
    on_rows: OnRows | None = None,
) -> TransformerScore:
    """Return how well the model in ``directory`` predicts ``held_out``; with ``ranks``, on each of
    them.

    ``on_rows`` gets, every SAVE_EVERY_S, the bits of the rows that are done, in the order in which
    they are predicted, and facts; an unfinished record of both, ``begun``, goes on from there: its
    rows are not predicted again, and all figures are those of one go, to the bit.

    ``tokenizer`` is that of the data, for a model that was trained with it and has no copy, and for
    conversations; ``allowed`` is for user code (``TextModel.open``); ``settings`` say how long rows
    are (default: the defaults). Raises CorruptData where its
    predictions are not finite, InvalidInput where it is not in safetensors, or its tokenizer is not
    here, does not fit it, does not keep the text, or is not that of the conversations; for user
    code also what its process raises.
    """
    settings, threads = settings or EvaluationSettings(), 1
    with threads_an_operation(1 if ranks is None else ranks.threads), ExitStack() as stack:

        def opened() -> TextModel:
            nonlocal threads
            model = _opened(directory, tokenizer, allowed, ranks, settings.context)
            if ranks is None:
                threads = stack.enter_context(scoring_threads(model))
            return model

        on_progress(0.0)  # reading the weights and measuring may take minutes
        serving = _measured_here(begun, ranks)
        if serving is None:
            model, serving = measure_serving(opened, ranks, settings.serving_batch)
        else:
            model = opened()

        def save(bits_R: Reals, facts: Mapping[str, Any]) -> None:
            assert on_rows is not None, "it is passed on below"
            on_rows(bits_R, {**facts, "serving": serving})

        if isinstance(model.network, UserModel):
            model.network.threads = usable_cores()  # its calls come one by one
        read = [_read(model, each, tokenizer) for each in held_out]
        bits_D, bins = _bits(
            model, read, on_progress, threads, ranks, begun=begun, on_rows=on_rows and save
        )
    return TransformerScore(
        bits=bits_D,
        latency_ms=serving.prefill_ms,
        serving=serving,
        dtype=model.dtype,
        model_bytes=sum(path.stat().st_size for path in weight_files(directory)),
        weights_digest=weights_digest(directory),
        tokens=sum(int(each.counts.sum()) for each in read),
        calibration=bins,
        parameters=model.parameters,
        context=model.longest_context,
        judged_context=max((min(len(each.targets), model.context) for each in read), default=0),
    )


def _opened(
    directory: Path,
    tokenizer: Tokenizer | None,
    allowed: AllowedCode | None,
    ranks: Ranks | None,
    context: int,
) -> TextModel:
    if ranks is None:
        return TextModel.open(directory, tokenizer, allowed=allowed, context=context)
    model, error = None, None
    try:
        model = TextModel.open(directory, tokenizer, ranks=ranks, context=context)
    except PermanentError as found:
        error = found
    ranks.agree(error)  # before any of them waits for the others
    assert model is not None, "an error is raised on every rank"
    return model


def token_figures(
    model: TextModel, held_out: Sequence[HeldOutDocument], tokenizer: Tokenizer | None = None
) -> list[tuple[Tokens, Reals, NDArray[np.bool_]]]:
    """Return of each of ``held_out`` its scored tokens, their log-probabilities in nats, and
    whether each was the most likely one, (N,); raises as ``score_transformer``."""
    parts: list[list[tuple[int, Reals, NDArray[np.bool_]]]] = [[] for _ in held_out]
    with scoring_threads(model) as threads:
        if isinstance(model.network, UserModel):
            model.network.threads = usable_cores()
        read = [_read(model, each, tokenizer) for each in held_out]
        _bits(model, read, lambda _fraction: None, threads, None, parts)
    found = []
    for each, its in zip(read, parts, strict=True):
        its.sort(key=lambda part: part[0])  # batches are in the order of lengths
        nats_N, right_N = (np.concatenate([part[at] for part in its]) for at in (1, 2))
        found.append((each.targets[each.counts], -nats_N, right_N))
    return found


@dataclass(frozen=True)
class _Read:
    """A document as a model reads it: inputs, targets, and which of the targets are scored."""

    inputs: Tokens
    targets: Tokens
    counts: NDArray[np.bool_]


def _read(model: TextModel, document: HeldOutDocument, tokenizer: Tokenizer | None) -> _Read:
    if (chat := document.conversation) is None:
        tokens = model.encode(document.text, whole=True)
        inputs = np.concatenate([[model.first], tokens[:-1]])
        return _Read(inputs, tokens, np.ones(len(tokens), np.bool_))
    wanted = "" if tokenizer is None else tokenizer.digest
    if model.tokenizer.digest != wanted:
        raise InvalidInput(
            "the conversations are in the tokens of another tokenizer",
            got=f"a model of tokenizer {model.tokenizer.digest[:16] or 'bytes'}",
            wanted=wanted[:16],
            where=model.directory,
            do="Judge it on a snapshot built with its own tokenizer.",
        )
    tokens = chat.tokens.astype(np.int64)
    return _Read(tokens[:-1], tokens[1:], chat.mask[1:])


def _measured_here(begun: RecordedScore | None, ranks: Ranks | None) -> Serving | None:
    """Return the serving figures of ``begun`` where they were measured on this machine, or that of
    one of the ``ranks``; else None."""
    found = None if begun is None else Serving.model_validate(begun.facts["serving"])
    machine, gpu = serving_machine()
    here = found is not None and found.machine == machine and found.gpu in ("", gpu)
    if ranks is not None:
        here = ranks.everyone([here])[0] > 0  # all measure, or none
    return found if here else None


def _bits(
    model: TextModel,
    documents: Sequence[_Read],
    on_progress: Callable[[float], None],
    threads: int,
    ranks: Ranks | None,
    parts: Sequence[list[tuple[int, Reals, NDArray[np.bool_]]]] = (),
    begun: RecordedScore | None = None,
    on_rows: OnRows | None = None,
) -> tuple[Reals, Bins]:
    """Return bits per document, and all tokens' bins. ``parts``, one list a document, get each
    window's first scored token, and of all of them the nats, and which were the most likely.
    ``begun`` and ``on_rows``: see ``score_transformer``."""
    import torch

    inputs, targets = [each.inputs for each in documents], [each.targets for each in documents]
    batches = _batches(model, targets)
    documents_R = [each.document for batch in batches for each in batch]
    before = [0, *accumulate(map(len, batches))]  # each batch, rows
    share, shares = (0, 1) if ranks is None else (ranks.share, ranks.shares)
    order = digest_of([model.device.type, shares, before])
    bits_R, bins, first = np.zeros(len(documents_R)), np.zeros((BINS, 3), dtype=np.int64), 0
    if begun is not None and begun.facts["order"] == order:
        first = before.index(len(begun.bits))
        if share == 0:
            bits_R[: len(begun.bits)] = begun.bits
            bins += np.array(begun.facts["calibration"])
    # All ranks call the model equally often: some at the end without a window.
    steps = range(first, len(batches), shares)
    mine = [batches[at + share] if at + share < len(batches) else [] for at in steps]
    calls = [max(_calls(model, each) for each in batches[at : at + shares]) for at in steps]

    def predict(batch: Sequence[Window], calls: int) -> Predicted:
        with torch.inference_mode():  # a thread-local setting
            return _predicted(model, batch, inputs, targets, calls)

    with ThreadPoolExecutor(threads) as pool:
        # Ranks make all their calls of each other in one thread, and so in one order.
        found = (map if ranks else pool.map)(predict, mine, calls)
        saved = time.monotonic()
        for at, batch, its in zip(steps, mine, found, strict=True):
            for row, window in enumerate(batch):
                fresh = slice(window.fresh - window.start, window.end - window.start)
                counts = documents[window.document].counts[window.fresh : window.end]
                nats = its.nats[row, fresh][counts]
                bits_R[before[at + share] + row] = float(nats.sum()) / np.log(2)
                right = its.right[row, fresh][counts]
                _count(bins, its.best[row, fresh][counts], right)
                if parts:
                    parts[window.document].append((window.fresh, nats, right))
            done = min(at + shares, len(batches))
            on_progress(done / len(batches))
            if on_rows is not None and _is_due(saved, ranks):
                saved_R, sums = _together(bits_R[: before[done]], bins, ranks)
                _by_document(model, documents_R[: len(saved_R)], saved_R, len(documents))  # finite
                on_rows(saved_R, {"order": order, "calibration": sums})
                saved = time.monotonic()
    bits_R, sums = _together(bits_R, bins, ranks)
    return _by_document(model, documents_R, bits_R, len(documents)), sums


def _by_document(model: TextModel, rows: Sequence[int], bits_R: Reals, documents: int) -> Reals:
    """Return the bits of each document from those of rows; ``rows`` are their documents."""
    bits_D = np.zeros(documents)
    np.add.at(bits_D, np.array(rows, dtype=np.int64), bits_R)  # one by one, in this order
    if not np.isfinite(bits_D).all():
        raise CorruptData(
            "the model's predictions are not finite",
            got=f"NaN or infinity in {int((~np.isfinite(bits_D)).sum())} documents",
            wanted="probabilities",
            where=model.directory,
        )
    return bits_D


def _batches(model: TextModel, targets: Sequence[Tokens]) -> list[list[Window]]:
    """Return the windows of all documents, in the batches that are predicted at once."""
    found: list[list[Window]] = []
    for first in range(0, len(targets), GROUP):
        todo = [
            each
            for number, tokens in enumerate(targets[first : first + GROUP], start=first)
            for each in windows(len(tokens), model.context, number)
        ]
        found += in_batches(model, todo, lambda each: each.end - each.start)
    return found


def _is_due(saved: float, ranks: Ranks | None) -> bool:
    over = time.monotonic() - saved > SAVE_EVERY_S
    return over if ranks is None else ranks.everyone([over])[0] > 0  # all save together


def _together(bits_R: Reals, bins: NDArray[np.int64], ranks: Ranks | None) -> tuple[Reals, Bins]:
    """Return the bits of rows, of which each is of one share, and the bins, of all shares."""
    if ranks is not None:
        bits_R, bins = ranks.total(bits_R), ranks.total(bins).astype(np.int64)
    return bits_R, tuple((int(n), int(right), int(sure)) for n, right, sure in bins)


def _count(bins: NDArray[np.int64], best: NDArray[np.int64], right: NDArray[np.bool_]) -> None:
    """Add tokens to ``bins``; ``best`` are probabilities in millionths."""
    of = np.minimum(best * BINS // MILLION, BINS - 1)
    for column, each in enumerate((np.ones_like(best), right, best)):
        np.add.at(bins[:, column], of, each)


def _calls(model: TextModel, batch: Sequence[Window]) -> int:
    """Return how many pieces the longest row of ``batch`` has."""
    return -(-max(window.end - window.start for window in batch) // model.piece)


@dataclass(frozen=True)
class Predicted:
    """Of each target, (B, T): its nats, the probability of the most likely token in millionths, and
    whether that one is the target."""

    nats: Reals
    best: NDArray[np.int64]
    right: NDArray[np.bool_]


def _predicted(
    model: TextModel,
    group: Sequence[Window],
    inputs: Sequence[Tokens],
    targets: Sequence[Tokens],
    calls: int,
) -> Predicted:
    longest = max((window.end - window.start for window in group), default=1)
    # Padding is at the end of each row; causal attention keeps it out of everything that is scored.
    shape = (max(1, len(group)), longest)
    tokens_BT = np.full(shape, model.separator, dtype=np.int64)
    wanted_BT = np.zeros(shape, dtype=np.int64)
    for row, window in enumerate(group):
        length = window.end - window.start
        tokens_BT[row, :length] = inputs[window.document][window.start : window.end]
        wanted_BT[row, :length] = targets[window.document][window.start : window.end]
    return predicted(model, tokens_BT, wanted_BT, calls)


def predicted(model: TextModel, tokens_BT: Tokens, wanted_BT: Tokens, calls: int = 1) -> Predicted:
    """Return how well ``model`` predicts ``wanted_BT`` from ``tokens_BT``; ``calls``: see
    ``TextModel.pieces``."""
    import torch
    import torch.nn.functional as F  # noqa: N812 - the field's name for it

    nats, best, right, at = [], [], [], 0
    for logits_BTV in model.pieces(torch.from_numpy(tokens_BT), calls=calls):
        shape = tuple(logits_BTV.shape[:2])
        wanted = torch.from_numpy(wanted_BT[:, at : at + shape[1]])
        at += shape[1]
        logits_NV, targets_N = logits_BTV.float().flatten(0, 1), wanted.flatten().to(model.device)
        nats_N = F.cross_entropy(logits_NV, targets_N, reduction="none")
        highest_N, chosen_N = logits_NV.max(-1)
        of_target_N = logits_NV.gather(1, targets_N[:, None])[:, 0]
        best_N = (highest_N - of_target_N - nats_N).exp().nan_to_num() * MILLION
        nats.append(nats_N.view(shape).double().cpu().numpy())
        best.append(best_N.round().clamp(0, MILLION).long().view(shape).cpu().numpy())
        right.append((chosen_N == targets_N).view(shape).cpu().numpy())
        del logits_BTV, logits_NV  # before those of the next piece
    return Predicted(*(np.concatenate(each, axis=1) for each in (nats, best, right)))


@contextmanager
def scoring_threads(model: TextModel) -> Iterator[int]:
    """Yield how many threads score batches of ``model`` at once; they share all cores. Of a large
    vocabulary few keep the logits within their limit."""
    cores = usable_cores()
    threads = threads_for(model, cores)
    with threads_an_operation(cores // threads):
        yield threads


@contextmanager
def threads_an_operation(count: int) -> Iterator[None]:
    """Limit torch to ``count`` threads per operation.

    With one, threads work on separate batches. Multi-threaded operations wait for the slowest core
    at every step: on a busy machine that made one forward pass of a 2 M model 1,157 ms instead of
    22.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
