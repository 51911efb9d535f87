"""Chat templates: conversations as tokens, with a mask of those that an assistant says.

A model's own template, rendered by transformers. Where it marks what the assistant says
(``{% generation %}``) the mask is the library's; else a message of the assistant is what its
rendering adds to the prompt before it. Does not read sources and does not choose conversations.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from datetime import date
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from paceline.data.formats import Array
from paceline.data.snapshot import Snapshot, store_at
from paceline.errors import InvalidInput, SourceMissing
from paceline.extras import is_installed
from paceline.schemas import canonical_json
from paceline.storage import ObjectStore

CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILES = (CONFIG_FILE, "chat_template.jinja", "special_tokens_map.json")
MAX_FILE_BYTES = 64 * 1024 * 1024
# What a template gets that writes the day, so that the same rows are the same tokens on each day:
# the date that Llama's own templates write where they have no clock.
TODAY = date(2024, 7, 26)
_CLOCK = re.compile(r"\bstrftime_now\(\s*(?P<quote>['\"])(?P<format>[^'\"\\]*)(?P=quote)\s*\)")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers finds it


def template_files(tokenizer: str) -> list[str]:
    """Return paths or URLs of the files that decide how conversations become tokens: those beside
    the ``tokenizer``, a tokenizer.json."""
    parent = tokenizer.rpartition("/")[0] or "."
    return [f"{parent}/{name}" for name in TEMPLATE_FILES]


class ChatTemplate:
    """The chat template beside the tokenizer.json called ``tokenizer`` (a path, or s3://…).

    ``files``: those that decide, where they are not beside it, tokenizer_config.json first. Files
    are read when it is first used: ``is_used`` tells whether it was.
    """

    def __init__(
        self,
        tokenizer: str,
        store: ObjectStore | None = None,
        files: Sequence[str] | None = None,
    ) -> None:
        self._name, self._store = tokenizer, store
        self._files = template_files(tokenizer) if files is None else files
        self.is_used = False

    @cached_property
    def digest(self) -> str:
        both = dict.fromkeys((self._template, self._with_tools))  # of most models one
        return hashlib.sha256("".join(both).encode()).hexdigest()

    @property
    def config(self) -> bytes:
        """Return a tokenizer_config.json with the template and the special tokens that it names."""
        named = {"default": self._template, "tool_use": self._with_tools}
        several = [{"name": name, "template": each} for name, each in named.items()]
        template = several if self._with_tools != self._template else self._template
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
        return canonical_json(self._tokenizer.special_tokens_map | kind)

    def without_system(self, text: bytes) -> bytes:
        """Return the ``text`` of a conversation from what follows the system message, if any."""
        for start, end in self._openings:
            if text.startswith(start) and (at := text.find(end, len(start))) >= 0:
                return text[at + len(end) :]
        return text

    @cached_property
    def _openings(self) -> list[tuple[bytes, bytes]]:
        """Return what stands before and after a system message; first of conversations without."""
        system, user = (
            {"role": "system", "content": "\ue000"},
            {"role": "user", "content": "\ue001"},
        )
        found = []
        for messages in ([user], [system, user]):
            try:
                opening, _, rest = self._render(messages, None).partition("\ue001")
            except ValueError:  # of a template that refuses system messages
                continue
            start, _, end = opening.partition("\ue000")
            if rest and (start or end):
                found.append((start.encode(), end.encode()))
        return found

    def prompt(self, message: str) -> tuple[list[int], int | None]:
        """Return the tokens of a user's ``message`` up to where the assistant begins to answer, and
        the token that ends the answer. Raises InvalidInput where the template refuses the message.
        """
        messages = [{"role": "user", "content": message}]
        text = self.text_of(messages, add_generation_prompt=True)
        tokens = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return list(tokens), self.end

    @property
    def end(self) -> int | None:
        """Return the token that ends an answer."""
        end: int | None = self._tokenizer.eos_token_id
        return end

    def text_of(self, messages: list[dict[str, Any]], **more: Any) -> str:
        """Return ``messages`` rendered with options of transformers; raises InvalidInput where the
        template refuses them."""
        try:
            return self._render(messages, None, **more)
        except ValueError as error:
            raise InvalidInput(
                "the message cannot be rendered", got=error, where=f"beside {self._name}"
            ) from error

    def tokens(
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None, *, prompt: int = 0
    ) -> tuple[str, Array, Array]:
        """Return a conversation's text, tokens and mask: True where an assistant says the token.

        Messages with ``weight`` 0 and the first ``prompt`` ones do not count. Raises ValueError,
        with the reason, for a conversation that the template refuses, or of which no token counts;
        InvalidInput where there is no template that works.
        """
        self.is_used = True
        text = self._render(messages, tools)
        said = [n for n, each in enumerate(messages) if each["role"] == "assistant"]
        left_out = [n for n in said if messages[n].get("weight") == 0]
        is_marked = _GENERATION.search(self._template_for(tools)) is not None
        if is_marked:
            found = self._apply(
                messages,
                tools,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        if left_out or prompt or not is_marked:
            encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            starts, ends = np.array(encoded["offset_mapping"]).reshape(-1, 2).T
        tokens = np.array((found if is_marked else encoded)["input_ids"])
        if is_marked:
            mask = np.array(found["assistant_masks"], bool)
            for number in left_out:
                start, end = self._span(messages, number, tools, text, "leave its weight 0 out")
                mask &= (ends <= start) | (starts >= end)
        else:
            mask = np.zeros(len(tokens), bool)
            do = "mark what assistants say with {% generation %}"
            for number in sorted({*said} - {*left_out}):
                start, end = self._span(messages, number, tools, text, do)
                mask |= (starts >= start) & (ends <= end) & (starts < ends)
        if prompt:
            before = self._render(messages[:prompt], tools, add_generation_prompt=True)
            if not text.startswith(before):
                raise ValueError("the chat template renders the prompt differently by itself")
            mask &= starts >= max(1, len(before))
        if not mask[1:].any():
            raise ValueError("no token is an assistant's")
        return text, tokens.astype(np.uint32), mask

    def _span(
        self, messages: list[Any], number: int, tools: list[Any] | None, text: str, do: str
    ) -> tuple[int, int]:
        """Return where an assistant's message begins, after what introduces it, and ends in
        ``text``.

        Raises ValueError, with what to ``do``, where the template renders the start of a
        conversation differently once it goes on (it drops reasoning, say).
        """
        up_to = self._render(messages[: number + 1], tools)
        asked = self._render(messages[: number or 1], tools, add_generation_prompt=True)
        if number:
            start = len(asked) if up_to.startswith(asked) else -1
        else:  # nothing precedes it: what introduces an answer is what introduces the next one
            opening = asked.removeprefix(up_to)
            start = up_to.find(opening) + len(opening) if opening and opening in up_to else -1
        if start < 0 or not text.startswith(up_to):
            raise ValueError(
                f"the chat template renders what precedes the end of message {number + 1} "
                f"differently by itself: {do}"
            )
        return start, len(up_to)

    def _render(self, messages: list[Any], tools: list[Any] | None, **more: Any) -> str:
        return str(self._apply(messages, tools, tokenize=False, **more))

    def _apply(self, messages: list[Any], tools: list[Any] | None, **more: Any) -> Any:
        from jinja2 import TemplateSyntaxError

        tokenizer, template = self._tokenizer, self._template_for(tools)
        try:
            return tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template, **more
            )
        except TemplateSyntaxError as error:
            raise InvalidInput(
                "not a chat template",
                got=f"{error.message} (line {error.lineno})",
                where=f"beside {self._name}",
                do="Correct the chat template of the model.",
            ) from error
        except Exception as error:
            raise ValueError(
                f"the chat template raises {type(error).__name__}: {error}"[:300]
            ) from error

    def _template_for(self, tools: list[Any] | None) -> str:
        """Return the template to render with, which writes the same day on each day."""
        template = self._template if tools is None else self._with_tools
        return _CLOCK.sub(lambda found: repr(TODAY.strftime(found["format"])), template)

    @cached_property
    def _with_tools(self) -> str:
        """Return the template of conversations with tools: some models have one of their own."""
        return str(self._tokenizer.get_chat_template(tools=[])) if self._template else ""

    @cached_property
    def _template(self) -> str:
        try:
            return str(self._tokenizer.get_chat_template())
        except ValueError as error:
            raise InvalidInput(
                "the model has no chat template",
                got=f"none beside {self._name}",
                wanted=f"chat_template.jinja, or chat_template in {CONFIG_FILE}",
                do="Put one there; or give the rows of the data a text field, and generate without "
                "--chat.",
            ) from error

    @cached_property
    def _tokenizer(self) -> Any:
        if self._name == "bytes":
            raise InvalidInput(
                "conversations need the tokenizer and the chat template of a model",
                got="tokenizer 'bytes'",
                wanted="a tokenizer.json with the chat template beside it",
                do="Name it: --tokenizer MODEL/tokenizer.json.",
            )
        from transformers import PreTrainedTokenizerFast

        with TemporaryDirectory(prefix="chat-template-") as directory:
            places = [self._name, *self._files]
            for name, place in zip(("tokenizer.json", *TEMPLATE_FILES), places, strict=False):
                if (data := self._read(place)) is not None:
                    (Path(directory) / name).write_bytes(data)
            try:
                return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
            except Exception as error:
                raise InvalidInput(
                    "the tokenizer's configuration cannot be read",
                    got=f"{type(error).__name__}: {error}"[:300],
                    wanted=f"{CONFIG_FILE} as transformers saves it",
                    where=f"beside {self._name}",
                ) from error

    def _read(self, url: str) -> bytes | None:
        """Return the content of a file, or None where it does not exist."""
        if self._store is None or "://" not in url:
            return Path(url).read_bytes() if Path(url).is_file() else None
        try:
            return store_at(url, self._store).get_bytes(url, max_bytes=MAX_FILE_BYTES)
        except SourceMissing:
            return None


def template_config(snapshot: Snapshot, store: ObjectStore) -> bytes | None:
    """Return the ``ChatTemplate.config`` that ``snapshot`` was built with; None where it has no
    conversations, or is of a version that stored none."""
    if (url := snapshot.template_url) is None:
        return None
    try:
        return store_at(url, store).get_bytes(url, MAX_FILE_BYTES)
    except SourceMissing:
        return None


def snapshot_template(snapshot: Snapshot, store: ObjectStore) -> ChatTemplate | None:
    """Return the template that ``snapshot`` was built with; None as ``template_config``, or
    without transformers."""
    if template_config(snapshot, store) is None or not is_installed("transformers"):
        return None
    return ChatTemplate(str(snapshot.tokenizer_url), store, [str(snapshot.template_url)])
