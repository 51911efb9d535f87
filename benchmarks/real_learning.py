"""Real learning: how well about a million parameters predict Python, in ten minutes and in an hour.

A byte-level model learns the running Python's standard library and is scored on 200 of its files
that it never saw: whole files, each by itself, in bits per byte, beside gzip -9 and xz -9 on the
same files. The budget is training time (wall or CPU seconds; what evaluation, compiling and saving
take is reported apart and not counted); the learning rate falls with the share of the budget that
is spent, so a run of ten minutes is not a cut-off run of an hour.

    python benchmarks/real_learning.py --seconds 600 --directory DIR     # ten minutes
    python benchmarks/real_learning.py --seconds 3600 --directory DIR    # an hour
    python benchmarks/real_learning.py --plot                            # the curves of both

Killed and started again with the same arguments it goes on from its last save (every minute).

The model: embeddings of the byte and, hashed, of the last 2 to N bytes; blocks of causal attention
(rotary, queries and keys normalised) and squared-ReLU feed-forwards; all counted as parameters.
Matrices learn by Muon, the rest by AdamW. Products in bfloat16 where this processor is faster at
them (it is measured), master weights in float32.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import lzma
import math
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import Tensor, nn

RESULTS = Path(__file__).parent / "results"
HELD_OUT_FILES = 200
SEPARATOR = 0xFF
SAVE_EVERY_S = 60.0
VOCABULARY = 256
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}
GOALS = {600.0: 2.0, 3600.0: 1.70}  # bits per byte


@dataclass(frozen=True)
class Shape:
    """The model and its recipe; each is a dial of ``--set``."""

    width: int = 192
    layers: str = "lf"  # one letter a block: l sees the last ``window`` bytes and more, f all
    window: int = 128
    heads: int = 3
    hidden: int = 512  # of a feed-forward
    grams: int = 4  # the longest run of bytes with an embedding of its own
    buckets: int = 2048  # of each table of hashed runs
    gram_width: int = 48
    context: int = 512
    batch: int = 8  # rows of ``context`` bytes
    final_batch: int = 0  # rows at the end; 0: as ``batch``
    matrix_rate: float = 0.02  # Muon's
    other_rate: float = 3e-3  # AdamW's
    weight_decay: float = 0.0
    warmup_share: float = 0.01
    decay_share: float = 0.6  # of the budget, at the end, linear down to nothing
    seed: int = 0


# ------------------------------------------------------------------------------------- the model


class Attention(nn.Module):
    """Causal attention; written out, because CPU kernels in bfloat16 are slower than products."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.window = shape.window if kind == "l" and shape.context > shape.window else 0
        self.heads, self.size = shape.heads, shape.width // shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.scale = nn.Parameter(torch.full((shape.heads, 1, 1), math.sqrt(self.size)))

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        b, t, d = x_BTD.shape
        qkv_3BHTE = self.qkv(x_BTD).view(b, t, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        q_BHTE, k_BHTE, v_BHTE = qkv_3BHTE.unbind(0)
        q_BHTE = rotate(F.rms_norm(q_BHTE, (self.size,)), cos_TE, sin_TE)
        k_BHTE = rotate(F.rms_norm(k_BHTE, (self.size,)), cos_TE, sin_TE)
        q_BHTE = q_BHTE * (self.scale / math.sqrt(self.size)).to(q_BHTE.dtype)
        if self.window and t % self.window == 0:
            out_BHTE = near(q_BHTE, k_BHTE, v_BHTE, self.window)
        else:
            mask_TT = torch.full((t, t), -1e4, dtype=q_BHTE.dtype).triu(1)
            out_BHTE = F.softmax(q_BHTE @ k_BHTE.transpose(-1, -2) + mask_TT, -1) @ v_BHTE
        out_BTD: Tensor = self.out(out_BHTE.transpose(1, 2).reshape(b, t, d))
        return out_BTD


def near(q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, window: int) -> Tensor:
    """Return causal attention to the last ``window`` positions, in chunks of as many."""
    b, h, t, e = q_BHTE.shape
    n = t // window

    def before_and_here(x_BHTE: Tensor) -> Tensor:
        x_NWE = x_BHTE.reshape(b * h, n, window, e)
        earlier_NWE = F.pad(x_NWE[:, :-1], (0, 0, 0, 0, 1, 0))
        return torch.cat([earlier_NWE, x_NWE], dim=2).reshape(b * h * n, 2 * window, e)

    query, key = torch.arange(window)[:, None] + window, torch.arange(2 * window)[None]
    hidden_WK = (key > query) | (key <= query - window)
    mask_WK = torch.zeros(hidden_WK.shape, dtype=q_BHTE.dtype).masked_fill(hidden_WK, -1e4)
    score_NWK = q_BHTE.reshape(b * h * n, window, e) @ before_and_here(k_BHTE).transpose(-1, -2)
    out_NWE = F.softmax(score_NWK + mask_WK, -1) @ before_and_here(v_BHTE)
    return out_NWE.reshape(b, h, t, e)


class Block(nn.Module):
    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.attention = Attention(shape, kind)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(normed(x_BTD), cos_TE, sin_TE)
        out_BTD: Tensor = x_BTD + self.down(F.relu(self.up(normed(x_BTD))).square())
        return out_BTD


class Net(nn.Module):
    """Bytes in, logits of the next byte out. B rows, T bytes, D width, V vocabulary."""

    cos_TE: Tensor  # noqa: N815 - tensors carry shape letters
    sin_TE: Tensor  # noqa: N815

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.bytes = nn.Embedding(VOCABULARY, shape.width)
        runs = max(0, shape.grams - 1)
        self.grams = nn.ModuleList(
            nn.Embedding(shape.buckets, shape.gram_width) for _ in range(runs)
        )
        self.mix = nn.Linear(runs * shape.gram_width, shape.width, bias=False) if runs else None
        self.blocks = nn.ModuleList(Block(shape, kind) for kind in shape.layers)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        size = shape.width // shape.heads
        angle_TE = torch.outer(
            torch.arange(shape.context).float(), 10_000.0 ** (-torch.arange(0, size, 2) / size)
        )
        self.register_buffer("cos_TE", angle_TE.cos(), persistent=False)
        self.register_buffer("sin_TE", angle_TE.sin(), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        for name, each in self.named_parameters():
            if each.ndim < 2 or name.endswith("scale"):
                continue
            if name.startswith(("bytes", "grams")):
                nn.init.normal_(each, std=0.3)
            elif name.endswith(("out.weight", "down.weight", "head.weight")):
                nn.init.zeros_(each)
            else:
                nn.init.normal_(each, std=each.shape[1] ** -0.5)

    def forward(self, tokens_BT: Tensor, runs_NBT: Tensor) -> Tensor:
        dtype = self.head.weight.dtype
        x_BTD = self.bytes(tokens_BT)
        if self.mix is not None:
            found = [table(runs_BT) for table, runs_BT in zip(self.grams, runs_NBT, strict=True)]
            x_BTD = x_BTD + self.mix(torch.cat(found, dim=-1))
        x_BTD = normed(x_BTD)
        t = tokens_BT.shape[1]
        cos_TE, sin_TE = self.cos_TE[:t].to(dtype), self.sin_TE[:t].to(dtype)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_TE, sin_TE)
        logits_BTV: Tensor = self.head(normed(x_BTD))
        return 30 * torch.tanh(logits_BTV.float() / 30)

    def loss_sum(self, tokens_BT: Tensor, runs_NBT: Tensor, targets_BT: Tensor) -> Tensor:
        logits_BTV = self(tokens_BT, runs_NBT)
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")


def normed(x_BTD: Tensor) -> Tensor:
    return F.rms_norm(x_BTD, (x_BTD.shape[-1],))


def rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    low, high = x_BHTE.chunk(2, dim=-1)
    return torch.cat([low * cos_TE - high * sin_TE, high * cos_TE + low * sin_TE], dim=-1)


def hashed_runs(tokens_BT: np.ndarray, shape: Shape) -> np.ndarray:
    """Return for each position the buckets of its last 2, 3, … ``grams`` bytes, as NBT."""
    runs = []
    value_BT = tokens_BT.astype(np.uint64)
    code_BT = value_BT.copy()
    for back in range(1, shape.grams):
        earlier_BT = np.full_like(value_BT, SEPARATOR)
        earlier_BT[:, back:] = value_BT[:, :-back]
        code_BT = code_BT * np.uint64(0x100000001B3) + earlier_BT + np.uint64(back)
        mixed_BT = (code_BT ^ (code_BT >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        runs.append((mixed_BT >> np.uint64(33)) % np.uint64(shape.buckets))
    if not runs:
        return np.zeros((0, *tokens_BT.shape), dtype=np.int64)
    return np.stack(runs).astype(np.int64)


# -------------------------------------------------------------------------------------- the data


@dataclass(frozen=True)
class Text:
    """All training bytes as one stream, and the held-out files."""

    train: np.ndarray
    held_out: list[bytes]
    files: int


def read_text(limit_bytes: int = 0) -> Text:
    """Return the standard library; the held-out files are the first of its shuffled order.

    Order and split are functions of the paths alone; files of equal text count once.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = [each.relative_to(root) for each in root.rglob("*.py") if each.is_file()]
    names = [each for each in names if not _NOT_THE_LIBRARY & set(each.parts)]
    names.sort(key=lambda each: hashlib.sha256(each.as_posix().encode()).digest())
    texts: dict[bytes, None] = {}  # in order, each once
    taken = 0
    for name in names:
        text = (root / name).read_bytes()
        if text.strip() and b"\0" not in text:
            texts[text] = None
            taken += len(text)
        if limit_bytes and taken > limit_bytes:
            break
    files = list(texts)
    held = min(HELD_OUT_FILES, len(files) // 8)
    separator = bytes([SEPARATOR])
    stream = separator + separator.join(files[held:]) + separator
    return Text(np.frombuffer(stream, np.uint8), files[:held], len(files))


def windows(text: Text, shape: Shape, seed: int, first: int) -> Iterator[np.ndarray]:
    """Yield rows of ``context + 1`` bytes from row number ``first`` on: a function of (seed, row).

    Each epoch cuts the stream at another offset and takes every window once, in random order.
    """
    epoch, row = 0, first
    while True:
        draw = np.random.default_rng([seed, epoch])
        offset = int(draw.integers(shape.context))
        count = (len(text.train) - 1 - offset) // shape.context
        if row < count:
            for each in draw.permutation(count)[row:]:
                start = offset + int(each) * shape.context
                yield text.train[start : start + shape.context + 1]
            row = 0
        else:
            row -= count
        epoch += 1


# ---------------------------------------------------------------------------------- the training


class Trainer:
    """A model, its optimisers, and how much of the budget is spent."""

    def __init__(self, shape: Shape, text: Text, *, bfloat16: bool, compiled: bool) -> None:
        torch.manual_seed(shape.seed)
        self.shape, self.text = shape, text
        self.net = Net(shape)
        self.spent = 0.0  # of the budget, seconds
        self.rows = 0
        self.tokens = 0
        self.dtype = torch.bfloat16 if bfloat16 else torch.float32
        matrices = [
            each
            for name, each in self.net.named_parameters()
            if each.ndim == 2 and name.startswith("blocks")
        ]
        known = {id(each) for each in matrices}
        others = [each for each in self.net.parameters() if id(each) not in known]
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (
                torch.optim.Muon(
                    matrices,
                    lr=shape.matrix_rate,
                    momentum=0.95,
                    weight_decay=shape.weight_decay,
                    adjust_lr_fn="original",
                ),
                shape.matrix_rate,
            ),
            (
                torch.optim.AdamW(
                    others,
                    lr=shape.other_rate,
                    betas=(0.9, 0.98),
                    weight_decay=0.0,
                    fused=True,
                ),
                shape.other_rate,
            ),
        ]
        # Products run on a copy of the weights in ``dtype``; the masters stay in float32.
        self.work = Net(shape).to(self.dtype) if bfloat16 else self.net
        self.loss_sum = torch.compile(self.work.loss_sum) if compiled else self.work.loss_sum
        self._copy()
        self._windows = windows(text, shape, shape.seed, 0)

    def _copy(self) -> None:
        if self.work is self.net:
            return
        with torch.no_grad():
            torch._foreach_copy_(list(self.work.parameters()), list(self.net.parameters()))

    def rate(self, share: float) -> float:
        """Return the factor of the learning rates once ``share`` of the budget is spent."""
        its = self.shape
        if share < its.warmup_share:
            return max(share / its.warmup_share, 0.02)
        return max(0.0, min(1.0, (1.0 - share) / its.decay_share))

    def batch(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        rows_BT = np.stack([next(self._windows) for _ in range(rows)])
        self.rows += rows
        return tensors(rows_BT, self.shape)

    def step(self, share: float) -> float:
        """Take one step with the budget's ``share`` spent; return the loss in nats per byte."""
        its = self.shape
        rows = its.final_batch if its.final_batch and share > 0.5 else its.batch
        tokens_BT, runs_NBT, targets_BT = self.batch(rows)
        loss = self.loss_sum(tokens_BT, runs_NBT, targets_BT) / targets_BT.numel()
        torch.autograd.backward(loss)
        if self.work is not self.net:
            for master, copy in zip(self.net.parameters(), self.work.parameters(), strict=True):
                if copy.grad is not None:
                    master.grad = copy.grad.float()
                    copy.grad = None
        factor = self.rate(share)
        for optimizer, rate in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._copy()
        self.tokens += targets_BT.numel()
        return float(loss.detach())

    def save(self, directory: Path, history: list[dict[str, Any]]) -> None:
        """Write everything that a later ``restore`` needs, whole or not at all."""
        directory.mkdir(parents=True, exist_ok=True)
        state = {
            "shape": asdict(self.shape),
            "net": self.net.state_dict(),
            "optimizers": [each.state_dict() for each, _ in self.optimizers],
            "spent": self.spent,
            "rows": self.rows,
            "tokens": self.tokens,
            "history": history,
        }
        torch.save(state, directory / "state.tmp")
        (directory / "state.tmp").replace(directory / "state.pt")

    def restore(self, directory: Path) -> list[dict[str, Any]]:
        """Go on from what ``save`` left in ``directory``; return its history."""
        state = torch.load(directory / "state.pt", weights_only=True)
        if state["shape"] != asdict(self.shape):
            sys.exit(f"{directory} holds a run with other settings: name another directory")
        self.net.load_state_dict(state["net"])
        for (optimizer, _), its in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(its)
        self.spent, self.rows, self.tokens = state["spent"], state["rows"], state["tokens"]
        self._windows = windows(self.text, self.shape, self.shape.seed, self.rows)
        self._copy()
        return list(state["history"])


def tensors(rows_BT: np.ndarray, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    inputs_BT = rows_BT[:, :-1]
    return (
        torch.from_numpy(inputs_BT.astype(np.int64)),
        torch.from_numpy(hashed_runs(inputs_BT, shape)),
        torch.from_numpy(rows_BT[:, 1:].astype(np.int64)),
    )


# ----------------------------------------------------------------------------------- the scoring


def score(net: Net, files: list[bytes], *, stride_share: float = 0.5) -> float:
    """Return bits per byte of whole ``files``, each by itself, every byte predicted once.

    A window moves on by ``stride_share`` of the context, so that all but a file's first bytes are
    predicted from at least the rest of it.
    """
    shape = net.shape
    stride = max(1, int(shape.context * stride_share))
    rows: list[np.ndarray] = []
    scored: list[tuple[int, int]] = []  # the targets of each row that count
    for file in files:
        data = np.frombuffer(bytes([SEPARATOR]) + file, np.uint8)
        end = len(data) - 1  # targets are data[1:]
        done, start = 0, 0
        while done < end:
            stop = min(start + shape.context, end)
            row = np.full(shape.context + 1, SEPARATOR, np.uint8)
            row[: stop - start + 1] = data[start : stop + 1]
            rows.append(row)
            scored.append((done - start, stop - start))
            done = stop
            start += stride
    nats = 0.0
    with torch.inference_mode():
        for first in range(0, len(rows), 32):
            part = slice(first, first + 32)
            tokens_BT, runs_NBT, targets_BT = tensors(np.stack(rows[part]), shape)
            logits_BTV = net(tokens_BT, runs_NBT)
            loss_BT = F.cross_entropy(
                logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none"
            ).view_as(targets_BT)
            for loss_T, (begin, stop) in zip(loss_BT, scored[part], strict=True):
                nats += float(loss_T[begin:stop].double().sum())
    return nats / math.log(2) / sum(len(each) for each in files)


def compressors(files: list[bytes]) -> dict[str, float]:
    """Return bits per byte of gzip -9 and xz -9 on each file by itself."""
    total = sum(len(each) for each in files)
    return {
        "gzip -9": 8 * sum(len(gzip.compress(each, 9)) for each in files) / total,
        "xz -9": 8 * sum(len(lzma.compress(each, preset=9)) for each in files) / total,
    }


# -------------------------------------------------------------------------------------- the runs


def faster_in_bfloat16() -> bool:
    """Return whether this processor multiplies matrices faster in bfloat16 than in float32."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.ones(4096, 256, dtype=dtype), torch.ones(256, 512, dtype=dtype)
        for _ in range(3):
            left @ right
        started = time.perf_counter()
        for _ in range(10):
            left @ right
        seconds[dtype] = time.perf_counter() - started
    return seconds[torch.bfloat16] < 0.6 * seconds[torch.float32]


def run(asked: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """Train for the budget, scoring at the marks, and return the record of it."""
    clock = time.process_time if asked.clock == "cpu" else time.perf_counter
    text = read_text(asked.limit_bytes)
    bfloat16 = faster_in_bfloat16() if asked.dtype == "auto" else asked.dtype == "bfloat16"
    trainer = Trainer(shape, text, bfloat16=bfloat16, compiled=asked.compile)
    history: list[dict[str, Any]] = []
    if asked.directory and (asked.directory / "state.pt").exists():
        history = trainer.restore(asked.directory)
    few = text.held_out[:: max(1, len(text.held_out) // asked.few)]
    marks = [each for each in asked.marks if each < asked.seconds]
    marks = [each for each in marks if not history or each > history[-1]["seconds"]]
    began = time.perf_counter()
    # Compiling and the first allocations are paid before the budget starts; nothing is learned.
    tokens_BT, runs_NBT, targets_BT = tensors(
        np.zeros((shape.batch, shape.context + 1), np.uint8), shape
    )
    torch.autograd.backward(trainer.loss_sum(tokens_BT, runs_NBT, targets_BT) * 0.0)
    trainer.work.zero_grad(set_to_none=True)
    prepared_s = time.perf_counter() - began
    losses: list[float] = []
    saved = trainer.spent
    while trainer.spent < asked.seconds:
        started = clock()
        losses.append(trainer.step(trainer.spent / asked.seconds))
        trainer.spent += clock() - started
        if marks and trainer.spent >= marks[0]:
            marks.pop(0)
            history.append(mark(trainer, losses, few, f"{len(few)} files"))
            tell(asked, history[-1])
            losses.clear()
        if asked.directory and trainer.spent - saved >= SAVE_EVERY_S:
            saved = trainer.spent
            trainer.save(asked.directory, history)
    if asked.directory:
        trainer.save(asked.directory, history)
    final = mark(trainer, losses, text.held_out if not asked.fast else few, "all")
    history.append(final)
    tell(asked, final)
    files = text.held_out if not asked.fast else few
    return {
        "benchmark": "real_learning",
        "budget_s": asked.seconds,
        "clock": asked.clock,
        "threads": torch.get_num_threads(),
        "dtype": str(trainer.dtype).removeprefix("torch."),
        "compiled": asked.compile,
        "parameters": sum(each.numel() for each in trainer.net.parameters()),
        "shape": asdict(shape),
        "train_bytes": len(text.train),
        "held_out_files": len(files),
        "held_out_bytes": sum(len(each) for each in files),
        "tokens": trainer.tokens,
        "tokens_per_second": trainer.tokens / trainer.spent,
        "prepared_s": prepared_s,
        "bits_per_byte": final["bits_per_byte"],
        "goal": GOALS.get(asked.seconds),
        "compressors": compressors(files),
        "history": history,
    }


def mark(trainer: Trainer, losses: list[float], files: list[bytes], what: str) -> dict[str, Any]:
    """Score the model as it is."""
    began = time.perf_counter()
    recent = losses[-200:]
    return {
        "seconds": trainer.spent,
        "tokens": trainer.tokens,
        "train_bits_per_byte": sum(recent) / max(1, len(recent)) / math.log(2),
        "bits_per_byte": score(trainer.work, files),
        "scored": what,
        "scoring_s": time.perf_counter() - began,
    }


def tell(asked: argparse.Namespace, found: dict[str, Any]) -> None:
    if not asked.quiet:
        sys.stderr.write(
            f"{found['seconds']:7.0f} s  {found['tokens'] / 1e6:8.2f} M bytes  "
            f"train {found['train_bits_per_byte']:.3f}  held out {found['bits_per_byte']:.4f}\n"
        )


def plot(results: Path) -> None:
    """Draw the curves of every run in ``results`` into real_learning.svg."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    record: dict[str, Any] = {}
    for path in sorted(results.glob("real_learning_*.json")):
        record = json.loads(path.read_text())
        axes.plot(
            [each["seconds"] / 60 for each in record["history"]],
            [each["bits_per_byte"] for each in record["history"]],
            marker="o",
            label=f"{record['budget_s'] / 60:.0f} minutes: {record['bits_per_byte']:.3f}",
        )
    if not record:
        sys.exit(f"no results in {results}: run the benchmark first")
    for name, value in record["compressors"].items():
        axes.axhline(value, linestyle=":", color="grey")
        axes.annotate(f"{name} {value:.2f}", (0, value), fontsize=8)
    for seconds, goal in GOALS.items():
        axes.plot([seconds / 60], [goal], marker="v", color="red", linestyle="none")
    axes.set(
        xlabel="minutes of training",
        ylabel="bits per byte on held-out files",
        title=f"{record['parameters'] / 1e6:.2f} M parameters, {record['threads']} threads",
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(results / "real_learning.svg")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run one budget (or draw), print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="training time")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--marks", type=float, nargs="*", default=None, help="seconds")
    parser.add_argument("--directory", type=Path, help="where the run's state is saved")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--compile", action="store_true", help="torch.compile the loss")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--limit-bytes", type=int, default=0, help="of text; 0: all of it")
    parser.add_argument("--fast", action="store_true", help="score few files, keep no result")
    parser.add_argument("--few", type=int, default=40, help="files scored at a mark")
    parser.add_argument("--quick", action="store_true", help="seconds only, to see that it runs")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--plot", action="store_true", help="only draw what results there are")
    asked = parser.parse_args(arguments)
    if asked.plot:
        plot(asked.results)
        return {}
    kinds = {each.name: type(getattr(Shape(), each.name)) for each in fields(Shape)}
    changes = dict(each.split("=", 1) for each in asked.set)
    shape = replace(Shape(), **{key: kinds[key](value) for key, value in changes.items()})
    if asked.quick:
        tiny = {"width": 48, "layers": "lf", "window": 32, "hidden": 64, "buckets": 64}
        shape = replace(shape, **tiny, context=64, batch=4)
        asked.limit_bytes, asked.compile, asked.fast = 200_000, False, True
        asked.threads, asked.few = 1, 3  # two threads on a busy machine wait for each other
        asked.seconds = min(asked.seconds, 1.0)
    if asked.marks is None:
        asked.marks = [asked.seconds * share for share in (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9)]
    before = torch.get_num_threads()
    torch.set_num_threads(asked.threads)
    try:
        record = run(asked, shape)
    finally:
        torch.set_num_threads(before)
    if not asked.fast:
        asked.results.mkdir(parents=True, exist_ok=True)
        name = f"real_learning_{asked.seconds:.0f}s.json"
        (asked.results / name).write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))
    return record


if __name__ == "__main__":
    main(sys.argv[1:])
