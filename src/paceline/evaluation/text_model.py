"""A model directory opened to read text: the network, its tokenizer, and its limits.

Reads only the model's files. Runs in float32 on a GPU that this process sees and that has room for
the weights, else on the CPU. The code of a user's module (``training.code_ref``) runs in a process
of its own, which imports it where ``security.code_sources`` allows it and its pin matches, and
returns logits; this process never imports it.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from paceline.data import Tokenizer, open_tokenizer
from paceline.errors import InvalidInput, PacelineError
from paceline.evaluation.user_code import UserProcess
from paceline.models import (
    TOKENIZER_FILE,
    UserCodeConfig,
    is_pretrained,
    read_user_code,
    require_tokenizer,
    weight_files,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from torch import Tensor

    from paceline.models import Pretrained, SavedTransformer

    Checkpoint = Pretrained | SavedTransformer

log = logging.getLogger(__name__)

Tokens = NDArray[np.int64]

# Tokens that a model predicts at once: a longer row is read piece by piece, with keys and values of
# the pieces before kept, so that logits take no more memory than those of a piece.
PIECE = 1024
WHOLE_BYTES = 512 * 1024 * 1024  # of a longer row's logits, where a model predicts rows whole
FLOATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
GPU_MARGIN_BYTES = 2 * 1024**3  # beside the weights: activations, logits, the libraries' buffers
CHILD = "paceline.training.user_code.next_tokens"  # by its name: no layer below imports training


@dataclass(frozen=True)
class AllowedCode:
    """Which user code may run to judge a model, and where it is fetched to."""

    sources: tuple[str, ...]  # security.code_sources
    cache: Path


class Ranks(Protocol):
    """The ranks that score one model together, as one of them: each has a part of the weights, and
    predicts a share of the batches. All make the same calls in the same order."""

    device: torch.device
    threads: int  # of each operation
    share: int  # of the batches that this rank predicts
    shares: int

    def place(self, found: Checkpoint) -> Any:
        """Return the network with this rank's part of the values, in float32; called with tokens,
        by all ranks equally often, it returns whole logits."""

    def total(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Return the sum of the shares' ``values``."""

    def everyone(self, values: Sequence[float]) -> list[float]:
        """Return the sum of all ranks' ``values``."""

    def agree(self, error: PacelineError | None) -> None:
        """Raise on every rank the error of the first one that has one."""


class UserModel:
    """The network of a user's model: called with tokens_BT, it returns logits_BTV in float32 on
    their device. One call at a time; its process ends with this object."""

    def __init__(self, directory: Path, code_ref: str, allowed: AllowedCode, device: str) -> None:
        """Open the model in ``directory``; raises what its process does, with the same parts."""
        self.threads = 1  # of its process
        self._process = UserProcess(CHILD, f"training.code_ref {code_ref}")
        self.pid = self._process.pid
        asked = {
            "directory": str(directory),
            "sources": list(allowed.sources),
            "cache": str(allowed.cache),
            "device": device,
        }
        answer = self._process.ask(json.dumps(asked).encode())
        try:
            facts: dict[str, Any] = json.loads(answer)
            self.width, self.parameters = int(facts["width"]), int(facts["parameters"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self._process.odd(answer) from error

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        import torch

        rows, length = tokens_BT.shape
        head = json.dumps({"rows": rows, "threads": self.threads}).encode()
        wanted = 4 * rows * length * self.width
        answer = self._process.ask(head + b"\n" + tokens_BT.cpu().numpy().tobytes(), wanted)
        if len(answer) != wanted:
            raise self._process.odd(answer)
        logits = torch.frombuffer(bytearray(answer), dtype=torch.float32)
        return logits.view(rows, length, self.width).to(tokens_BT.device)


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A model, and how it reads text."""

    directory: Path
    network: Any  # float32, in evaluation mode
    device: torch.device  # where it runs
    tokenizer: Tokenizer
    vocabulary: int  # rows of the embedding
    first: int  # before a text's first token: the tokenizer's BOS, or the separator, as in training
    separator: int  # after a document's last token
    context: int  # tokens of a row
    piece: int  # of these, that are predicted at once
    longest_context: int  # that the model was made for
    parameters: int
    dtype: str  # of the files

    @classmethod
    def open(
        cls,
        directory: Path,
        of_the_data: Tokenizer | None = None,
        device: torch.device | None = None,
        allowed: AllowedCode | None = None,
        ranks: Ranks | None = None,
        context: int = 0,
    ) -> TextModel:
        """Return the model in ``directory``, on ``device`` (default: ``device_for``), or this
        rank's part of it, for rows of ``context`` tokens (0: of its own context).

        Rows of a model that predicts them whole (user code, rotary positions that depend on the
        row's length) are at most as long as WHOLE_BYTES of logits.
        ``of_the_data`` is for a model of ours that was trained with this tokenizer and has no copy.
        A user's module runs in a process of its own, by code that is ``allowed`` (None: refused).
        Raises InvalidInput where the model is not in safetensors, or its tokenizer is not here or
        does not fit it; CorruptData and SourceMissing as ``models`` does; for a user's module also
        AccessDenied and TrainingFailed.
        """
        weight_files(directory)  # refuses pickled ones
        path = directory / TOKENIZER_FILE
        own = open_tokenizer(str(path)) if path.is_file() else None
        if (of_user := read_user_code(directory)) is not None:
            assert ranks is None, "user code runs in a process of its own"
            tokenizer = own or open_tokenizer("bytes")
            return cls._of_user(directory, of_user, tokenizer, device, allowed, context)
        from paceline.models import Pretrained, SavedTransformer

        found: Checkpoint
        if is_pretrained(directory):
            found = Pretrained.open(directory)
            tokenizer = own or open_tokenizer("bytes")
            separator, in_pieces = tokenizer.vocabulary.separator, found.reads_in_pieces
            first = separator if tokenizer.first is None else tokenizer.first
        else:
            found = SavedTransformer.open(directory)
            tokenizer = own or of_the_data or open_tokenizer("bytes")
            if not found.tokenizer_digest:
                tokenizer = open_tokenizer("bytes")
            separator, in_pieces = found.config.separator, True
            first = separator  # its training had no BOS, whatever its tokenizer adds
        require_tokenizer(found, tokenizer.digest, tokenizer.vocabulary.vocab_size)
        if ranks is None:
            found.require_sound()
            device = device or device_for(found.parameters)
            # in float32: few CPUs are fast in halves, and figures compare between machines
            network: Any = found.load(device)
        else:
            network, device = ranks.place(found), ranks.device
        rows, piece = _lengths(context, found.longest_context, found.vocab_size, in_pieces)
        return cls(
            directory=directory,
            network=network,
            device=device,
            tokenizer=tokenizer,
            vocabulary=found.vocab_size,
            first=first,
            separator=separator,
            context=rows,
            piece=piece,
            longest_context=found.longest_context,
            parameters=found.parameters,
            dtype=str(found.dtype).removeprefix("torch."),
        )

    @classmethod
    def _of_user(
        cls,
        directory: Path,
        config: UserCodeConfig,
        tokenizer: Tokenizer,
        device: torch.device | None,
        allowed: AllowedCode | None,
        context: int,
    ) -> TextModel:
        from paceline.models import stored_tensors

        require_tokenizer(config, tokenizer.digest, tokenizer.vocabulary.vocab_size)
        if allowed is None:
            raise InvalidInput(
                "a model of user code is judged, and not opened otherwise",
                got=f"code_ref {config.code_ref}",
                wanted="`paceline evaluate`, or paceline.evaluate in Python",
                where=directory,
                do="To use it otherwise, load its weights into the module that its code builds.",
            )
        stored = stored_tensors(directory).values()
        device = device or device_for(sum(math.prod(each.shape) for each in stored))
        network = UserModel(directory, config.code_ref, allowed, str(device))
        longest = config.max_position_embeddings
        rows, piece = _lengths(context, longest, network.width, False)
        return cls(
            directory=directory,
            network=network,
            device=device,
            tokenizer=tokenizer,
            vocabulary=network.width,
            first=config.bos_token_id,
            separator=config.bos_token_id,
            context=rows,
            piece=piece,
            longest_context=longest,
            parameters=network.parameters,
            dtype=", ".join(sorted({FLOATS[x.dtype] for x in stored if x.dtype in FLOATS})),
        )

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return logits_BTV of whole rows, on the model's device."""
        logits_BTV: Tensor = self.network(tokens_BT.to(self.device))
        return logits_BTV

    def pieces(
        self, tokens_BT: Tensor, *, cache: Any = None, step: int = 0, calls: int = 1
    ) -> Iterator[Tensor]:
        """Yield logits_BTV, on the model's device, of ``step`` tokens (default: a piece) after
        another, which follow those in ``cache``; drop them before the next.

        On ranks each makes at least ``calls`` calls of the network: the number of all of them.
        """
        tokens_BT, step = tokens_BT.to(self.device), step or self.piece
        parts = [tokens_BT[:, at : at + step] for at in range(0, tokens_BT.shape[1], step)]
        if isinstance(self.network, UserModel):
            assert len(parts) == 1, "it predicts rows whole"
            yield self.network(parts[0])
            return
        if cache is None and len(parts) > 1:
            cache = self.network.new_cache()
        for part in parts:
            yield self.network(part, cache=cache)
        for _ in range(calls - len(parts)):
            self.network(parts[0][:, :1])

    def decoder(self) -> Callable[[list[int]], Tensor]:
        """Return a function from a row of tokens to the logits_V of its next token, on the CPU.

        For a row that grows: keys and values of tokens that it was called with are kept. A row
        longer than the context is computed whole, from its last tokens, at each call: every token
        of it then has another position than before. So is each row of a user's module.
        """
        import torch

        cached = not isinstance(self.network, UserModel)
        cache, known = self.network.new_cache() if cached else None, 0

        def next_logits(row: list[int]) -> Tensor:
            nonlocal known
            with torch.inference_mode():
                if not cached or len(row) > self.context:
                    new, kept = row[-self.context :], None
                else:
                    new, known, kept = row[known:], len(row), cache
                for logits_BTV in self.pieces(torch.tensor([new]), cache=kept):
                    last_V = logits_BTV[0, -1].float().cpu()
                return last_V

        return next_logits

    def encode(self, text: bytes, *, whole: bool = False) -> Tokens:
        """Return the tokens of ``text``; raises InvalidInput for text that has none, and for
        ``whole`` where they do not say all of it.

        A first space may be lost: a tokenizer of SentencePiece's layout puts one there itself.
        """
        try:
            (tokens,) = self.tokenizer.encode([text])
            problem = tokens if isinstance(tokens, str) else ""
        except UnicodeDecodeError as error:
            tokens, problem = "", f"the text is not UTF-8: {error.reason} at byte {error.start}"
        if isinstance(tokens, str):
            raise InvalidInput(
                "text cannot be tokenised",
                got=problem,
                where=self.directory,
                do="Leave it out of the data.",
            )
        if whole:
            self._require_whole(text, self.tokenizer.text(tokens))
        return tokens.astype(np.int64)

    def _require_whole(self, text: bytes, back: bytes) -> None:
        if back == text:
            return
        # Many tokenizers compose characters first (NFC), which changes no character.
        composed = normalize("NFC", text.decode()).encode()
        if back in (composed, text.removeprefix(b" "), composed.removeprefix(b" ")):
            return
        shared = min(len(text), len(back))
        at = next((n for n in range(shared) if text[n] != back[n]), shared)
        raise InvalidInput(
            "the model's tokenizer does not keep the text, so that its figures compare with none",
            got=f"{back[at : at + 20]!r} at byte {at} of a document",
            wanted=f"{text[at : at + 20]!r}",
            where=self.directory,
        )


def _lengths(asked: int, longest: int, vocabulary: int, in_pieces: bool) -> tuple[int, int]:
    """Return the tokens of a row, and of a piece of it."""
    context = min(asked or longest, longest)
    if in_pieces:
        return context, min(context, PIECE)
    context = min(context, max(PIECE, WHOLE_BYTES // (4 * vocabulary)))
    return context, context


def device_for(parameters: int) -> torch.device:
    """Return the GPU with the most free memory, where the weights fit there in float32; the CPU
    where they do not, or this process sees no GPU."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    free = [torch.cuda.mem_get_info(each)[0] for each in range(torch.cuda.device_count())]
    number = max(range(len(free)), key=free.__getitem__)
    wanted = 4 * parameters + GPU_MARGIN_BYTES
    if free[number] < wanted:
        log.warning("no GPU has room, on the CPU free=%d wanted=%d", free[number], wanted)
        return torch.device("cpu")
    return torch.device("cuda", number)
