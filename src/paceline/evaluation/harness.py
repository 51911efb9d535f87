"""A model directory as lm-eval's harness sees a model. Imports lm-eval: only ``tasks`` uses it.

Every text begins with the tokenizer's BOS, or without one with the separator, as in training. Rows
longer than the context lose their beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from paceline.data import ChatTemplate
from paceline.errors import InvalidInput
from paceline.evaluation.generation import generate
from paceline.evaluation.serving import in_batches
from paceline.evaluation.text_model import TextModel
from paceline.evaluation.transformer import Predicted, predicted, scoring_threads
from paceline.models import TOKENIZER_FILE

MAX_NEW_TOKENS = 256  # as the harness's default; a task's generation_kwargs say otherwise

Pair = tuple[tuple[str, str], list[int], list[int]]  # texts, tokens of context and continuation


class HarnessModel(TemplateLM):  # type: ignore[misc] # the harness is not typed
    """Log-likelihoods and greedy continuations of ``model``, on the device that it is on."""

    def __init__(self, model: TextModel, *, as_chat: bool = False) -> None:
        super().__init__()
        self._model = model
        self._template = ChatTemplate(str(model.directory / TOKENIZER_FILE)) if as_chat else None
        end = None if self._template is None else self._template.end
        self._stops = set() if end is None else {end}
        self._rows: list[str] = []  # where each request comes from

    @property
    def eot_token_id(self) -> int:
        """Return the token before a text."""
        return self._model.first

    @property
    def tokenizer_name(self) -> str:
        """Return what the harness's cache, which is off, would be named by."""
        return str(self._model.directory)

    def chat_template(self, *_: Any) -> str:
        """Return nothing: only a log of the harness, which is off, would have it."""
        return ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation up to where the assistant begins to answer, or goes on with its
        last message. Raises InvalidInput where the template refuses it."""
        assert self._template is not None
        more = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        return self._template.text_of(chat_history, **more)

    def tok_encode(self, string: str, **_: Any) -> list[int]:
        """Return the tokens of ``string``, special tokens among them by their names, as the harness
        has them of transformers; its options for special tokens around it are ignored."""
        return [int(each) for each in self._model.encode(string.encode(), marked=True)]

    def loglikelihood_rolling(self, requests: Sequence[Instance], **_: Any) -> list[float]:
        """Refused by ``read_tasks``: bits per byte are in every report."""
        raise NotImplementedError

    def loglikelihood(self, requests: list[Instance], **_: Any) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood in nats, and whether it is the most likely one
        at each token. Raises InvalidInput for one that is longer than a row."""
        self._rows = [f"row {each.doc_id} of task {each.task_name}" for each in requests]
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **_: Any) -> list[tuple[float, bool]]:
        rows = [
            self._row(context, continuation, where)
            for (_, context, continuation), where in zip(requests, self._rows, strict=True)
        ]
        batches = in_batches(self._model, range(len(rows)), lambda number: len(rows[number]) - 1)
        lengths = [len(each[2]) for each in requests]
        answers: dict[int, tuple[float, bool]] = {}

        def predict(batch: list[int]) -> Predicted:
            with torch.inference_mode():
                return self._predicted([rows[each] for each in batch])

        with scoring_threads(self._model) as threads, ThreadPoolExecutor(threads) as pool:
            for batch, found in zip(batches, pool.map(predict, batches), strict=True):
                for at, number in enumerate(batch):
                    end = len(rows[number]) - 1  # of its targets, the last of which are the answer
                    own = slice(end - lengths[number], end)
                    nats, right = found.nats[at, own].sum(), found.right[at, own].all()
                    answers[number] = -float(nats), bool(right)
        return [answers[number] for number in range(len(rows))]

    def _row(self, context: list[int], continuation: list[int], where: str) -> list[int]:
        row = self._begun([*context, *continuation])
        if len(continuation) > self._model.context:
            raise InvalidInput(
                "an answer is longer than the model's context",
                got=f"{len(continuation)} tokens",
                wanted=f"at most {self._model.context}",
                where=f"{where} (from 0), {self._model.directory}",
                do="Leave the row out of the task, or shorten its answers.",
            )
        return row[-(self._model.context + 1) :]

    def _begun(self, row: list[int]) -> list[int]:
        """Return ``row`` with the token before a text, which a chat template may have written."""
        return row if row[:1] == [self._model.first] else [self._model.first, *row]

    def _predicted(self, rows: Sequence[list[int]]) -> Predicted:
        longest = max(map(len, rows))
        both_BT = np.full((len(rows), longest), self._model.separator, dtype=np.int64)
        for number, row in enumerate(rows):  # padded at the end, where causal attention cannot see
            both_BT[number, : len(row)] = row
        return predicted(self._model, both_BT[:, :-1].copy(), both_BT[:, 1:].copy())

    def generate_until(self, requests: Sequence[Instance], **_: Any) -> list[str]:
        """Return each prompt's greedy continuation up to the first of its stop strings."""
        with scoring_threads(self._model) as threads, ThreadPoolExecutor(threads) as pool:
            return list(pool.map(lambda each: self._continuation(*each.args), requests))

    def _continuation(self, prompt: str, options: dict[str, Any]) -> str:
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        said, row = "", self._begun(self.tok_encode(prompt))
        longest = int(options.get("max_gen_toks", MAX_NEW_TOKENS))
        for piece in generate(self._model, row, max_tokens=longest, stops=self._stops):
            said += piece
            if any(stop in said for stop in stops):
                break
        return said[: min([len(said), *(said.find(stop) for stop in stops if stop in said)])]
