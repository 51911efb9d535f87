"""Check of a published base model before any node is busy, by its config and its headers alone.

``python -m paceline.training.base_check`` is the process that builds the model without values: it
reads one line of JSON on standard input. Whether weights are finite, and tied ones equal, its
publish has found.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from paceline.config import DataSettings, TrainingSettings
from paceline.data import Snapshot, SnapshotRecord
from paceline.errors import PacelineError, ServiceUnavailable, from_record, to_record
from paceline.extras import is_installed
from paceline.manifest import require_sound_weights
from paceline.models import (
    CONFIG_FILE,
    ModelConfig,
    is_pretrained,
    read_config,
    require_described,
    require_tensors,
    require_tokenizer,
)
from paceline.storage import ObjectInfo, ObjectStore
from paceline.training.launcher import require_batches, require_tokens
from paceline.training.loop import require_pretrained
from paceline.training.parallel import MeshSpec, replicas_of, require_layout
from paceline.training.user_code import check_in_process

if TYPE_CHECKING:
    from paceline.models import Pretrained

DEADLINE_S = 60.0  # of reading what describes the model
MAX_HEADER_BYTES = 100_000_000  # that safetensors reads
MAX_FILE_BYTES = 64 * 1024 * 1024  # of one that describes the model
DESCRIBING_SUFFIXES = (".json", ".jinja")


def check_base(
    url: str,
    store: ObjectStore,
    settings: TrainingSettings,
    data: DataSettings,
    context: int,
    snapshot: Snapshot,
    *,
    builds: bool = True,
) -> None:
    """Raise InvalidInput where ``settings`` cannot train the model that is published at ``url`` on
    rows of ``context`` tokens of ``snapshot``, batched as ``data`` say.

    Checks config, tensor names and dtypes, tokenizer, mesh, layers of adapters, and that a batch's
    rows hold the samples. Checks nothing where the model is not published, and shapes, plans of
    transformers' models and names of parameters only if it ``builds`` the model, for which this
    machine has the libraries and seconds.
    """
    found, until_s = store.list(url), time.monotonic() + DEADLINE_S
    if not any(each.url == f"{url}/{CONFIG_FILE}" for each in found):
        return
    require_sound_weights(url, store)
    with TemporaryDirectory(prefix="base-check-") as directory:
        for each in found:
            name = each.url.removeprefix(f"{url}/")
            if time.monotonic() > until_s:
                raise ServiceUnavailable(
                    "what describes the base model cannot be read in time",
                    got=f"{name} after {DEADLINE_S:.0f} s",
                    where=url,
                )
            if "/" not in name:
                _write_outline(each, store, Path(directory) / name)
        asked: dict[str, Any] = {
            "directory": directory,
            "settings": settings.model_dump(mode="json"),
            "context": context,
            "snapshot": {
                "url": snapshot.url,
                "digest": snapshot.digest,
                "record": snapshot.record.model_dump(mode="json"),
            },
        }
        pretrained, vocabulary = is_pretrained(Path(directory)), snapshot.vocabulary
        with _named_as(directory, url):
            if pretrained:
                require_described(
                    Path(directory), context, vocabulary.sha256 or "", vocabulary.vocab_size
                )
            else:
                context = _require_ours(Path(directory), settings, snapshot).context
            require_tensors(Path(directory), settings.lora)
        require_tokens(snapshot, data)
        require_batches(snapshot, data, settings, context)
        needed = ["torch"] + ["transformers"] * pretrained + ["peft"] * (settings.lora is not None)
        builds = builds and (pretrained or names_parts(settings))
        if builds and all(is_installed(each) for each in needed):
            shown = {directory: url}
            check_in_process(__name__, asked, "check of the base model", url, shown=shown)


@contextmanager
def _named_as(directory: str, url: str) -> Iterator[None]:
    """Raise errors within, which name ``directory``, with ``url`` in its place."""
    try:
        yield
    except PacelineError as error:
        text = json.dumps(to_record(error)).replace(directory, url)
        raise from_record(json.loads(text)) from error


def _write_outline(info: ObjectInfo, store: ObjectStore, path: Path) -> None:
    """Write ``path``: what describes the model whole, of weights the header and then a hole."""
    if info.size <= MAX_FILE_BYTES and path.suffix in DESCRIBING_SUFFIXES:
        path.write_bytes(store.get_bytes(info.url))
        return
    with path.open("wb") as file:
        if path.suffix == ".safetensors":
            file.write(header_of(info, store))
        file.truncate(info.size)


def header_of(info: ObjectInfo, store: ObjectStore) -> bytes:
    """Return the header of a safetensors file, with its length before it."""
    length = int.from_bytes(_start_of(info, store, 8), "little")
    return _start_of(info, store, 8 + min(length, MAX_HEADER_BYTES))


def _start_of(info: ObjectInfo, store: ObjectStore, size: int) -> bytes:
    into = bytearray(min(size, info.size))
    if into:
        store.read_range_into(info.url, 0, memoryview(into), etag=info.etag, size=info.size)
    return bytes(into)


def names_parts(settings: TrainingSettings) -> bool:
    """Return whether ``settings`` depend on the names of the model's layers or parameters."""
    named = settings.lora or settings.groups or settings.no_decay
    return bool(named) or settings.optimizer == "muon"


def require_targets(config: ModelConfig | Pretrained, settings: TrainingSettings) -> None:
    """Raise InvalidInput where ``training`` names layers or parameters that the model does not
    have."""
    if not names_parts(settings):
        return
    import torch

    from paceline.models import Pretrained, Transformer, add_adapters
    from paceline.training.loop import require_groups

    with torch.device("meta"):
        empty = config.build() if isinstance(config, Pretrained) else Transformer(config)
    if settings.lora is not None:
        add_adapters(empty, settings.lora, settings.seed)
    require_groups(empty, settings)


def require_base(asked: dict[str, Any]) -> None:
    """Raise what ``check_base`` does; ``asked`` is what it sends."""
    directory, settings = Path(asked["directory"]), TrainingSettings(**asked["settings"])
    record = SnapshotRecord.model_validate(asked["snapshot"].pop("record"))
    snapshot = Snapshot(**asked["snapshot"], record=record)
    if is_pretrained(directory):
        from paceline.models import Pretrained

        found = Pretrained.open(directory)
        require_pretrained(found, settings, asked["context"], snapshot)
        require_targets(found, settings)
        return
    require_targets(read_config(directory), settings)


def _require_ours(directory: Path, settings: TrainingSettings, snapshot: Snapshot) -> ModelConfig:
    config, vocabulary = read_config(directory), snapshot.vocabulary
    require_layout(MeshSpec.of(settings.mesh, replicas_of(settings)), settings, config)
    require_tokenizer(config, vocabulary.sha256 or "", vocabulary.vocab_size)
    return config


def main() -> int:
    """Check the model on standard input; on failure the last line of output is the error."""
    try:
        require_base(json.loads(sys.stdin.readline()))
    except PacelineError as error:
        sys.stdout.write("\n" + json.dumps(to_record(error)) + "\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
