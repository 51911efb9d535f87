"""Tokenise text when a snapshot is built, and decode tokens.

``bytes`` needs no library; a ``tokenizer.json`` uses the ``tokenizers`` library (an optional extra
of this package). A tokenizer is identified by the digest of its file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.formats import Array
from paceline.data.snapshot import BYTE_VOCABULARY, Snapshot, Vocabulary, store_at
from paceline.errors import InvalidInput, SourceMissing
from paceline.storage import ObjectStore

MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
MAX_VOCABULARY = 2**31 - 1  # the limit of a snapshot's record
# Names of the end-of-document token; the first one in the vocabulary is the separator.
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]", "<|im_end|>")
# letters of other names: [EOS], <|eos|>, <｜end▁of▁sentence｜>
ENDS = {"eos", "endoftext", "endofdocument", "eod", "endofsentence"}


class Tokenizer:
    """Encodes texts as tokens; ``file`` is the content of the tokenizer.json, None for bytes."""

    def __init__(self, vocabulary: Vocabulary, file: bytes | None, made: Any) -> None:
        self.vocabulary = vocabulary
        self.file = file
        self._made = made

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the tokenizer.json; "" for bytes."""
        return self.vocabulary.sha256 or ""

    @property
    def dtype(self) -> str:
        """Return the smallest unsigned type that holds every token."""
        size = self.vocabulary.vocab_size
        return "uint8" if size <= 2**8 else "uint16" if size <= 2**16 else "uint32"

    @cached_property
    def _marking(self) -> Any:
        """Return the tokenizer with which special tokens in a text are tokens; a copy, because
        threads use both."""
        made = type(self._made).from_str(self._made.to_str())
        made.encode_special_tokens = False
        return made

    @cached_property
    def first(self) -> int | None:
        """Return the token that the post-processor puts before a text (BOS), None where it puts
        none."""
        if self._made is None or isinstance(self.encode([b"a"])[0], str):
            return None
        found = self._made.encode("a")
        return found.ids[0] if found.special_tokens_mask[:2] == [1, 0] else None

    def encode(self, texts: Sequence[bytes], *, marked: bool = False) -> list[Array | str]:
        """Return the tokens of each text (UTF-8), without separators.

        ``marked``: a special token's name in a text is that token, as in what a chat template
        writes; else it is text. Where the tokenizer fails on a text (a word that its vocabulary
        lacks), returns the reason as a string instead.
        """
        if self._made is None:
            return [np.frombuffer(each, dtype=np.uint8) for each in texts]
        said = [each.decode("utf-8") for each in texts]
        try:
            made = self._marking if marked else self._made
            encoded = made.encode_batch(said, add_special_tokens=False)
        except BaseException as error:  # noqa: BLE001 - reraised unless the text causes it
            _require_fault(error)
            if len(texts) > 1:
                return [tokens for each in texts for tokens in self.encode([each], marked=marked)]
            return [f"its tokenizer fails: {str(error)[:100]}"]
        return [np.array(each.ids, dtype=self.dtype) for each in encoded]

    def decode(self, tokens: Array) -> str:
        """Return the text of the tokens, as far as the tokenizer can restore it."""
        if self._made is None:
            return tokens.astype(np.uint8).tobytes().decode("utf-8", errors="replace")
        return str(self._made.decode(tokens.tolist(), skip_special_tokens=False))

    def text(self, tokens: Array) -> bytes:
        """Return the text of a document's ``tokens`` as UTF-8; for bytes, exactly the original."""
        if self._made is None:
            return tokens.tobytes()
        return self.decode(tokens).encode("utf-8", errors="surrogatepass")


def tokenizer_of(snapshot: Snapshot, store: ObjectStore) -> Tokenizer:
    return open_tokenizer(snapshot.tokenizer_url or "bytes", tokenizer_file(snapshot, store))


def tokenizer_file(snapshot: Snapshot, store: ObjectStore) -> bytes | None:
    """Return the content of the tokenizer.json that ``snapshot`` was built with; None for bytes."""
    url = snapshot.tokenizer_url
    return None if url is None else store_at(url, store).get_bytes(url, MAX_TOKENIZER_BYTES)


def open_tokenizer(name: str, file: bytes | None = None) -> Tokenizer:
    """Return the tokenizer called ``name``: ``"bytes"``, or the path of a tokenizer.json.

    ``file`` may hold the content of the tokenizer.json. Raises SourceMissing, MissingExtra
    without the library, InvalidInput for a file that is no tokenizer.json.
    """
    if name == "bytes":
        return Tokenizer(BYTE_VOCABULARY, None, None)
    if file is None:
        path = Path(name)
        if not path.is_file():
            raise SourceMissing(
                "no tokenizer here",
                got=name,
                wanted="'bytes', or the path of a tokenizer.json",
                do="Set data.tokenizer.",
            )
        with path.open("rb") as opened:
            file = opened.read(MAX_TOKENIZER_BYTES + 1)
    import tokenizers

    try:
        if len(file) > MAX_TOKENIZER_BYTES:
            raise ValueError(f"more than {MAX_TOKENIZER_BYTES} bytes")
        made = tokenizers.Tokenizer.from_buffer(file)
        made.no_truncation()
        made.no_padding()
        made.encode_special_tokens = True  # "<|endoftext|>" in a text is text
        size = made.get_vocab_size(with_added_tokens=True)
        # Ids can exceed the count where a vocabulary has holes.
        size = max(size, 1 + max(made.get_vocab(with_added_tokens=True).values(), default=0))
        named = (*SEPARATORS, *_other_ends(made))
        found = [each for each in map(made.token_to_id, named) if each is not None]
        separator = found[0] if found else size
        if max(size, separator + 1) > MAX_VOCABULARY:
            raise ValueError(f"a vocabulary of {size} tokens")
    except BaseException as error:
        _require_fault(error)
        raise InvalidInput(
            "not a tokenizer.json",
            got=str(error)[:200],
            wanted="a file that tokenizers saved",
            where=name,
        ) from error
    vocabulary = Vocabulary(
        kind="tokenizers",
        sha256=hashlib.sha256(file).hexdigest(),
        vocab_size=max(size, separator + 1),
        separator=separator,
    )
    return Tokenizer(vocabulary, file, made)


def _other_ends(made: Any) -> list[str]:
    """Return the special tokens that are called an end of a document, in order of their ids."""
    added = sorted(made.get_added_tokens_decoder().items())
    special = [token.content for _, token in added if token.special]
    return [each for each in special if "".join(filter(str.isalpha, each.lower())) in ENDS]


def _require_fault(error: BaseException) -> None:
    """Reraise ``error`` unless the library raised it because of a file or a text.

    That is an Exception, or a panic of its Rust code, which is not an Exception.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
