"""Check whether held-out documents occur in a candidate's training data.

Two documents are the same if their texts are equal except for white space: a copy under another
name, in another shard or with other line ends is found. The training split is read shard by shard,
so that memory holds one shard and 32 bytes a held-out document, whatever the snapshot's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from paceline.data import ShardCache, Snapshot, content_digest, tokenizer_of
from paceline.schemas.training import Overlap
from paceline.storage import ObjectStore

EXAMPLES = 5
AHEAD = 3  # shards fetched while one is compared


def overlap(
    held_out: Iterable[tuple[str, bytes]],
    training: Snapshot,
    store: ObjectStore,
    cache_dir: Path,
    *,
    quarantined: Sequence[str] = (),
    on_progress: Callable[[float], None] = lambda _fraction: None,
) -> Overlap:
    """Return how many of ``held_out`` (key, text) are in the training split of ``training``.

    Shards in ``quarantined`` were not used in training and are left out; any other unreadable shard
    raises CorruptData. Samples of a tokenised snapshot are compared as the text that their tokens
    decode to.
    """
    tokenizer = tokenizer_of(training, store)
    keys: dict[bytes, list[str]] = {}
    compared = 0
    for key, text in held_out:
        if not text.strip():
            continue  # nothing to predict, and equal for every sample without text
        compared += 1
        (tokens,) = tokenizer.encode([text])
        digests = {content_digest(text)}
        if not isinstance(tokens, str):  # a string: the tokenizer fails, so no shard has it
            # What the tokenizer drops (case, rare letters) is missing on both sides.
            digests.add(content_digest(tokenizer.text(tokens)))
        for digest in digests:
            keys.setdefault(digest, []).append(key)
    left = {key for found in keys.values() for key in found}
    examples: list[str] = []
    shards = [each for each in training.of_split("train") if each.sha256 not in set(quarantined)]
    with ShardCache(training, store, cache_dir, ahead=AHEAD - 1) as cache:
        for number, shard in enumerate(shards):
            cache.prefetch(shards[number : number + AHEAD])
            with cache.samples(shard) as samples:
                for i in range(len(samples)):
                    digest = content_digest(tokenizer.text(samples.tokens(i)))
                    for key in keys.get(digest, ()):
                        if key in left:
                            left.remove(key)
                            examples.append(f"{key} = {samples.key(i)}")
            on_progress((number + 1) / len(shards))
    return Overlap(
        snapshot_digest=training.digest,
        held_out_documents=compared,
        training_documents=sum(each.documents for each in shards),
        found=len(examples),
        examples=tuple(examples[:EXAMPLES]),
    )
