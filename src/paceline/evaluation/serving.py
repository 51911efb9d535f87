"""What it costs to serve a model, measured on this machine: one row, then a batch, float32, on the
GPU that the model is on, or on the CPU.

Peak memory is what a machine needs to answer such a row: on a CPU that of the whole process with
its libraries, on a GPU what torch allocated there. The batch is measured after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from paceline.evaluation.text_model import Ranks, TextModel, UserModel
from paceline.schemas import Serving
from paceline.system import processor

LATENCY_RUNS = 6
DECODED_TOKENS = 16
MEASURED_S = 10.0  # after these a figure has no further run: of 0.5 B parameters, a row takes 30 s
BATCH_ROWS = 8  # at most, of the batch whose throughput is measured
BATCH_RUNS = 2
# At most, by kind of device; on CPUs more leave their caches (docs/measurements/training.md).
TOKENS_PER_BATCH = {"cpu": 1024, "cuda": 32_768}
LOGITS_BYTES = 512 * 1024 * 1024  # in float32, at most, of all threads together
PEAK = "VmHWM"
_PROCESS = Path("/proc/self")
Row = TypeVar("Row")


def measure_serving(
    open_model: Callable[[], TextModel], ranks: Ranks | None = None, batch: int = 0
) -> tuple[TextModel, Serving]:
    """Return the model that ``open_model`` opens, and what it costs to serve it.

    A row has the context's length; the last of its tokens are also decoded one by one. ``batch`` is
    how many of them a batch has (0: up to BATCH_ROWS; fewer of user code where logits are too
    large). On ``ranks`` all answer the same rows, each by its part of the
    weights: times are this rank's, memory is that of all of them together. Memory is not known
    (None) where the kernel does not let a process reset its peak.
    """
    import torch

    resets = _reset_peak()
    model = open_model()
    row = [model.separator] * model.context
    fitting = batch_rows(model)
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)

    def measured_ms(act: Callable[[int], object], runs: int) -> list[float]:
        found: list[float] = []
        while len(found) < runs and not (found and slow(found)):
            began = time.perf_counter()
            act(len(found))
            found.append(1000 * (time.perf_counter() - began))
        return found

    def slow(found: Sequence[float]) -> bool:
        over = sum(found) > 1000 * MEASURED_S
        return over if ranks is None else ranks.everyone([over])[0] > 0  # all stop together

    def forward(rows: int) -> None:
        step = max(1, model.piece * min(rows, fitting) // rows)
        with torch.inference_mode():
            for _ in model.pieces(torch.tensor([row] * rows), step=step):
                pass
            if on_gpu:
                torch.cuda.synchronize(model.device)

    next_logits, first = model.decoder(), max(1, model.context - DECODED_TOKENS)
    next_logits(row[:first])  # a prefill, which warms up; each call ends with logits on the CPU
    token_ms = measured_ms(lambda done: next_logits(row[: first + done + 1]), len(row) - first)
    prefill_ms = statistics.median(measured_ms(lambda _: forward(1), LATENCY_RUNS))
    peak_bytes, count = _peak_bytes(model) if resets or on_gpu else None, 1
    if ranks is not None:
        known, total = ranks.everyone([peak_bytes is not None, peak_bytes or 0])
        count = int(ranks.everyone([1])[0])
        peak_bytes = int(total) if known == count else None
    whole = isinstance(model.network, UserModel)
    rows = min(batch or BATCH_ROWS, fitting) if whole or not batch else batch
    batch_ms = prefill_ms
    if rows > 1:  # the better of two: the first one warms up
        batch_ms = min(measured_ms(lambda _: forward(rows), BATCH_RUNS))
    serving = Serving(
        machine=platform.node(),
        cpu=processor()[0],
        gpu=torch.cuda.get_device_name(model.device) if on_gpu else "",
        threads=torch.get_num_threads(),
        batch=1,
        context=model.context,
        prefill_ms=prefill_ms,
        decode_ms_per_token=statistics.median(token_ms or [prefill_ms]),
        peak_memory_bytes=peak_bytes,
        ranks=count,
        throughput_rows=rows,
        throughput_ms=batch_ms,
    )
    return model, serving


def serving_machine() -> tuple[str, str]:
    """Return the names of this machine and of its GPU, "" where torch has none."""
    import torch

    return platform.node(), torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def batch_rows(model: TextModel) -> int:
    """Return how many rows of a whole context are predicted at once, by each thread."""
    row_bytes = 4 * model.vocabulary * model.piece
    most = TOKENS_PER_BATCH[model.device.type] // model.context
    return max(1, min(most, LOGITS_BYTES // (4 * row_bytes)))


def in_batches(
    model: TextModel, rows: Iterable[Row], length: Callable[[Row], int]
) -> list[list[Row]]:
    """Return ``rows``, shortest first, in batches that are predicted at once by each thread:
    ``batch_rows``, or more where they have no more tokens, with padding, than pieces of those. User
    code gets no more rows: it may pad them."""
    least, is_ours = batch_rows(model), not isinstance(model.network, UserModel)
    batches: list[list[Row]] = [[]]
    for row in sorted(rows, key=length):
        count = len(batches[-1]) + 1
        fits = is_ours and count * length(row) <= least * model.piece
        if count > least and not fits:
            batches.append([])
        batches[-1].append(row)
    return [each for each in batches if each]


def threads_for(model: TextModel, cores: int) -> int:
    """Return how many threads keep the logits within their limit; one drives a GPU, or a process
    of user code."""
    if model.device.type != "cpu" or isinstance(model.network, UserModel):
        return 1
    batch_bytes = 4 * model.vocabulary * model.piece * batch_rows(model)
    return max(1, min(cores, LOGITS_BYTES // batch_bytes))


def _reset_peak() -> bool:
    """Set this process's peak of resident memory to what it has now; False where it cannot."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc's: return what models before had
        ctypes.CDLL(None).malloc_trim(0)
    try:
        (_PROCESS / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak_bytes(model: TextModel) -> int | None:
    process, of_user = _PROCESS, isinstance(model.network, UserModel)
    if of_user:
        process = _PROCESS.with_name(str(model.network.pid))
    if model.device.type == "cuda":
        import torch

        return None if of_user else torch.cuda.max_memory_allocated(model.device)
    found = re.search(rf"^{PEAK}:\s+(\d+) kB$", (process / "status").read_text(), re.MULTILINE)
    return None if found is None else 1024 * int(found[1])
