"""One sample as read from a source, before tokenisation, and the limits on samples."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.snapshot import LOSS_MASK, REJECTED_AT
from paceline.errors import short_repr

Array = npt.NDArray[Any]

MAX_DOCUMENT_BYTES = 8 * 1024 * 1024  # of one text
TOO_LARGE = f"too large: a text has at most {MAX_DOCUMENT_BYTES >> 20} MiB, cut it up (JSONL)"
MAX_SAMPLE_BYTES = 64 * 1024 * 1024  # of one sample with all arrays
MAX_AXES = 8
MAX_KEY_BYTES = 4096
MAX_SLICE_CHARS = 100
MAX_COLUMNS = 1000  # the limit of a snapshot's record
MAX_COLUMN_NAME = 128
MAX_JSON_BYTES = 3 * MAX_DOCUMENT_BYTES  # the longest text with each character escaped
MAX_JSON_MEMORY = 128 * 1024 * 1024  # of the parsed JSON values
# Bytes that the parser allocates at most for each of these; measured with CPython 3.11.
_JSON_COSTS = {b",": 40, b"[": 64, b"{": 64, b":": 200}
_FOUR_BYTES = re.compile(rb"[\xf0-\xff]")  # lead byte of a character beyond U+FFFF
# Maximum size of a decompressed file: a constant, plus a multiple of the bytes read of it. Deflate
# reaches a ratio of 1,032, text 3 to 10; without a limit a few MB keep a build busy for hours.
EXPANSION_SLACK_BYTES = 256 * 1024 * 1024
MAX_EXPANSION = 256


@dataclass(frozen=True)
class Sample:
    """A key with a text, tokens or arrays, or several of them."""

    key: str
    text: bytes | None = None  # UTF-8
    tokens: Array | None = None  # 1-D integers: the source is tokenised already
    features: Mapping[str, Array] = field(default_factory=dict)
    is_chat: bool = False  # ``text`` is a conversation: as JSON until a chat template renders it

    @property
    def payload_bytes(self) -> int:
        tokens = 0 if self.tokens is None else self.tokens.nbytes
        arrays = sum(each.nbytes for each in self.features.values())
        return len(self.text or b"") + tokens + arrays


@dataclass(frozen=True)
class Fields:
    """The location of a sample's text and key: JSONL fields, Parquet columns, a tar member's
    extension."""

    text: str = "text"
    key: str = "key"
    slice: str = ""  # whose value is the directory of the sample's name; "": none
    slices: Sequence[str] = ()  # or several, each a directory COLUMN=VALUE

    def name(self, key: str, take: Callable[[str], object]) -> str:
        """Return the name of a sample with ``key``: below the values of its slices, which ``take``
        takes out of the sample."""
        if self.slice:
            return f"{_directory(take(self.slice))}/{key}"
        return "/".join([*(f"{each}={_directory(take(each))}" for each in self.slices), key])


def _directory(value: object) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    shown = "".join(each for each in text[:MAX_SLICE_CHARS] if each.isprintable())
    return "(none)" if value is None else shown.replace("/", "_") or "(empty)"


@dataclass(frozen=True)
class UnusableSample:
    """A part of a source that is not a usable sample, and the reason."""

    key: str
    reason: str


def length_of(tokens: Array, features: Mapping[str, Array]) -> int:
    """Return a sample's length: its number of tokens.

    Without tokens: the first axis of its first feature (by name) that has one; else 1 for scalars,
    and 0 without features.
    """
    if len(tokens):
        return len(tokens)
    axes = (len(features[name]) for name in sorted(features) if features[name].ndim)
    return next(axes, 1 if features else 0)


def pack_sample(sample: Sample) -> bytes:
    """Return ``sample`` as bytes, for a scratch file or a child process; not a file format."""
    arrays = {name: np.asarray(each) for name, each in sample.features.items()}
    if sample.tokens is not None:
        arrays = {"": sample.tokens, **arrays}  # a feature's name is never empty
    text = None if sample.text is None else len(sample.text)
    about = [(name, each.dtype.str, each.shape) for name, each in arrays.items()]
    head = json.dumps([sample.key, text, about, sample.is_chat]).encode()
    size = len(head).to_bytes(4, "little")
    return b"".join([size, head, sample.text or b"", *(each.tobytes() for each in arrays.values())])


def unpack_sample(raw: bytes) -> Sample:
    """Return the sample packed by ``pack_sample``; its arrays own their memory."""
    at = 4 + int.from_bytes(raw[:4], "little")
    key, size, about, is_chat = json.loads(raw[4:at])
    text = None if size is None else raw[at : at + size]
    at += size or 0
    arrays: dict[str, Array] = {}
    for name, dtype, shape in about:
        array = np.frombuffer(raw, dtype, math.prod(shape), at).reshape(shape).copy()
        arrays[name] = array
        at += array.nbytes
    return Sample(key, text, arrays.pop("", None), arrays, is_chat)


def check_sample(sample: Sample) -> Sample | UnusableSample:
    """Return ``sample``, or Unusable with the reason.

    Rejects what a snapshot cannot hold for each sample, before the snapshot is written.
    """
    reason = _key_fault(sample.key) or _columns_fault(sample.features)
    if reason is None and REJECTED_AT in sample.features and not sample.is_chat:
        reason = f"a feature is called {REJECTED_AT!r}"
    if reason is not None:
        pass
    elif sample.text is not None:
        reason = why_no_text(sample.text)
    elif sample.tokens is not None and not len(sample.tokens):
        reason = "empty"
    elif sample.tokens is None and not sample.features:
        reason = "neither text nor numbers"
    if reason is None and sample.payload_bytes > MAX_SAMPLE_BYTES:
        reason = "too large"
    return sample if reason is None else UnusableSample(sample.key, reason)


# Conversations: rows with ``messages`` (and ``tools``), or with ``prompt`` and ``completion``.
# Pairs of them: rows with ``prompt``, ``chosen`` and ``rejected``, each a text or messages.

ANSWERS = ("chosen", "rejected")
PAIR_FIELDS = ("prompt", *ANSWERS)
CHAT_FIELDS = ("messages", "tools", "completion", *PAIR_FIELDS)


def is_conversation(row: Mapping[str, object]) -> bool:
    """Return whether a row of JSONL or Parquet is a conversation, or a pair of them."""
    return "messages" in row or {"prompt", "completion"} <= row.keys() or is_pair(row)


def is_pair(row: Mapping[str, object]) -> bool:
    """Return whether a row has, or was meant to have, a chosen and a rejected answer."""
    is_other = "messages" in row or "completion" in row
    return not is_other and len(row.keys() & set(PAIR_FIELDS)) > 1


def conversation_of(key: str, row: Mapping[str, object]) -> Sample | UnusableSample:
    """Return the conversation in ``row``, its messages and tools as JSON (then what a completion in
    messages adds, or each answer of a pair), or why it is none."""
    messages, tools = row.get("messages"), row.get("tools")
    answers: list[Any] = []
    both = all(row.get(name) and isinstance(row[name], str | list) for name in ANSWERS)
    if both and not is_pair(row):  # data of both kinds, as ultrafeedback_binarized
        kept = "messages" if "messages" in row else "prompt, completion"
        pairs = f"{', '.join(PAIR_FIELDS)}, for pairs"
        return UnusableSample(key, f"it has {kept} and {ANSWERS[0]}: keep {kept}; or {pairs}")
    if is_pair(row):
        reason, messages, answers = _pair(row)
    elif "messages" not in row and isinstance(row["completion"], list):
        messages, answers = row["prompt"], [row["completion"]]
        reason = _messages_fault(messages, "prompt") or _messages_fault(answers[0], "completion")
        reason = reason or _answer_fault(answers[0], "completion")
    else:
        if "messages" not in row:
            messages = [*_said("user", row["prompt"]), *_said("assistant", row["completion"])]
        reason = _chat_fault(messages)
    if reason is None and tools is not None and not isinstance(tools, list):
        reason = "its 'tools' is no list"
    if reason is not None:
        return UnusableSample(key, reason)
    try:
        text = json.dumps([messages, tools, *answers], ensure_ascii=False).encode()
    except UnicodeEncodeError:  # an unpaired surrogate, which JSON can encode
        return UnusableSample(key, "not UTF-8")
    return check_sample(Sample(key, text, is_chat=True))


def _said(role: str, content: object) -> list[dict[str, object]]:
    return [{"role": role, "content": content}]


def _pair(row: Mapping[str, Any]) -> tuple[str | None, list[Any], list[Any]]:
    """Return why ``row`` is no pair, the prompt's messages, and those of the two answers."""
    if missing := [name for name in PAIR_FIELDS if row.get(name) is None]:
        return f"a pair of answers without {missing[0]!r}", [], []
    if len({isinstance(row[name], str) for name in PAIR_FIELDS}) > 1:
        return f"some of {', '.join(PAIR_FIELDS)} are texts, others messages", [], []
    prompt, *answers = (row[name] for name in PAIR_FIELDS)
    if isinstance(prompt, str):
        prompt, answers = _said("user", prompt), [_said("assistant", each) for each in answers]
    reason = _messages_fault(prompt, "prompt")
    for name, messages in zip(ANSWERS, answers, strict=True):
        reason = reason or _messages_fault(messages, name) or _answer_fault(messages, name)
    return reason, prompt, answers


def _answer_fault(messages: list[dict[str, Any]], name: str) -> str | None:
    if messages[0]["role"] != "assistant":
        return f"its {name!r} begins with a message of {messages[0]['role']!r}"
    said = all(each.get("tool_calls") or each["content"].strip() for each in messages)
    return None if said else f"its {name!r} is empty"


def _chat_fault(messages: object) -> str | None:
    reason = _messages_fault(messages, "messages")
    if reason is None and isinstance(messages, list):
        weights = [each.get("weight") for each in messages if each["role"] == "assistant"]
        if not weights:
            reason = "no message is an assistant's"
        elif all(each == 0 for each in weights):
            reason = "every message of an assistant has weight 0"
    return reason


def _messages_fault(messages: object, field: str) -> str | None:
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        return f"its {field!r} is no list of messages"
    for number, each in enumerate(messages, start=1):
        if not isinstance(each.get("role"), str):
            return f"message {number} has no role"
        if not isinstance(each.get("content"), str) and not each.get("tool_calls"):
            return f"message {number} has no text as content"
        weight = each.get("weight")
        if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
            return f"message {number} has weight {short_repr(weight, 50)}, not 0 or 1"
    return None if messages or field == "messages" else f"its {field!r} is empty"


def _key_fault(key: str) -> str | None:
    if not key:
        return "its name is empty"
    if not _is_utf8(key):
        return "name is not UTF-8"
    size = len(key.encode())
    return None if size <= MAX_KEY_BYTES else f"its name has {size} bytes, of {MAX_KEY_BYTES}"


def _columns_fault(features: Mapping[str, Array]) -> str | None:
    if len(features) > MAX_COLUMNS:
        return f"{len(features)} features, at most {MAX_COLUMNS} wanted"
    for name in features:
        # A shard stores "NAME.ends" beside each column.
        taken = name.endswith(".ends") and name.removesuffix(".ends") in features
        if not 1 <= len(name) <= MAX_COLUMN_NAME or not _is_utf8(name) or taken:
            return f"a feature is called {name[:MAX_COLUMN_NAME]!r}"
    mask = features.get(LOSS_MASK)
    if mask is not None and (mask.ndim != 1 or mask.dtype != np.bool_):
        return f"its {LOSS_MASK!r} is no list of true and false"
    return None


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def why_no_text(text: bytes) -> str | None:
    """Return why ``text`` is not a valid document, or None if it is valid."""
    if len(text) > MAX_DOCUMENT_BYTES:
        return TOO_LARGE
    if b"\0" in text:
        return "binary"
    if not text.strip():
        return "empty"
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return "not UTF-8"
    return None


def require_numbers(dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Raise ValueError for an array type or shape that samples cannot have.

    These are objects, strings, complex numbers, too many axes, or an axis longer than any sample.
    """
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise ValueError(f"dtype {str(dtype)[:40]} holds no numbers of ours")
    if len(shape) > MAX_AXES:
        raise ValueError(f"{len(shape)} axes")
    if any(not 0 <= each <= MAX_SAMPLE_BYTES for each in shape):
        raise ValueError(f"shape {str(shape)[:60]}")


def clean_array(value: Any) -> Array:
    """Return ``value`` as a contiguous little-endian array of numbers.

    Raises ValueError where it is none (see ``require_numbers``).
    """
    array = np.asarray(value)
    require_numbers(array.dtype, array.shape)
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return little if little.ndim == 0 else np.ascontiguousarray(little)


def parsed_json(raw: bytes) -> Any:
    """Return the value of the JSON text ``raw``.

    Raises ValueError for invalid JSON, text that is too long, or values that would take more than
    ``MAX_JSON_MEMORY``.
    """
    if len(raw) > MAX_JSON_BYTES:
        raise ValueError(
            f"too large: JSON has at most {MAX_JSON_BYTES >> 20} MiB a sample, numbers fit into "
            "Parquet or npy"
        )
    if len(raw) * max(_JSON_COSTS.values()) > MAX_JSON_MEMORY:
        memory = sum(raw.count(each) * cost for each, cost in _JSON_COSTS.items())
        if _FOUR_BYTES.search(raw):  # then a string takes 4 bytes a character, twice
            memory += 8 * len(raw)
        if memory > MAX_JSON_MEMORY:
            raise ValueError("too large: its values take too much memory, cut it up")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError("not JSON") from error


def json_array(value: object) -> Array | None:
    """Return a JSON value as an array, or None if it holds no numbers (a name, a comment, a tag).

    JSON does not distinguish number types, so that all become float32; a source whose types matter
    should be Parquet or npy. Raises ValueError for lists of differing lengths.
    """
    if isinstance(value, bool):
        return np.array(value)
    if not isinstance(value, int | float | list) or not _is_numeric(value):
        return None
    array = np.asarray(value)  # ragged: ValueError
    if array.dtype.kind == "b":
        return array
    if array.dtype.kind not in "iuf":
        return None
    with np.errstate(over="ignore"):  # becomes infinite; validation reports it
        return clean_array(array.astype(np.float32))


def _is_numeric(value: object) -> bool:
    """Return whether nested lists hold only numbers.

    numpy would store strings in an array as wide as the longest one.
    """
    pending = [value]
    while pending:
        each = pending.pop()
        if not isinstance(each, list):
            continue
        kinds = set(map(type, each))
        if list in kinds:
            pending += each
            kinds.discard(list)
        if not kinds <= {int, float, bool}:
            return False
    return True
