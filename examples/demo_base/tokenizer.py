"""Train the tokenizer of the demo's base (profiles/models/pylm) on this Python's standard library.

A byte-level BPE of 2,048 tokens, from the files that a snapshot of ``stdlib`` trains on: no
held-out file is read. Python 3.11.7 gives the tokenizer that is shipped.

    python examples/demo_base/tokenizer.py tokenizer.json
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HELD_OUT = 0.1  # the share, as [data] held_out_share
WORDS = Regex(r" ?[A-Za-z]+|\d{1,3}| ?[^\sA-Za-z\d]+[\r\n]*|\s*[\r\n]+|\s+")
LEFT_OUT = ("site-packages", "dist-packages", "__pycache__")


def is_held_out(name: str) -> bool:
    """Return whether a snapshot with seed 0 holds the file ``name`` out."""
    drawn = hashlib.sha256(f"split:0:{name}".encode()).digest()
    return int.from_bytes(drawn[:8]) / 2**64 < HELD_OUT


def texts(root: Path) -> Iterator[str]:
    """Yield the text of each Python file below ``root`` that is trained on."""
    for directory, inner, names in os.walk(root):
        inner[:] = sorted(each for each in inner if each not in LEFT_OUT)
        for path in sorted(Path(directory, each) for each in names if each.endswith(".py")):
            if not is_held_out(path.relative_to(root).as_posix()):
                try:
                    yield path.read_text()
                except UnicodeDecodeError:
                    continue  # test data of the library in other encodings


tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
    pre_tokenizers.Split(WORDS, "isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
])  # fmt: skip
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=2048,
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    special_tokens=["<|endoftext|>"],
)
tokenizer.train_from_iterator(texts(Path(sysconfig.get_path("stdlib"))), trainer)
tokenizer.save(sys.argv[1])
