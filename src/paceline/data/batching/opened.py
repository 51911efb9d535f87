"""One open shard's framed token stream: separator, document, separator, …, document, separator.

Where samples lie end to end as they were stored, their tokens are one array, and a batch is cut out
of it; where each is made when it is read (a transform), they are asked for one by one.

Shape letters: D documents of a shard.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.batching.rows import Ints
from paceline.data.samples import ShardSamples
from paceline.data.snapshot import Shard
from paceline.errors import CorruptData, InvalidInput

Array = npt.NDArray[Any]


class OpenShard:
    """A shard's samples, and where each is; ``lengths`` are its index's, None: as they are stored.

    ``flat`` is all tokens end to end, of document d the ``count_D[d]`` from ``first_D[d]`` on (none
    for a sample of features only), or None. ``offsets_D1`` are places in the framed stream: of each
    document's separator, and of the last one. Raises CorruptData where shard and index disagree.
    """

    def __init__(self, shard: Shard, samples: ShardSamples, lengths: Array | None) -> None:
        self.shard = shard
        self.samples = samples
        self.bad: dict[int, str] = {}  # document → why
        self.flat: Array | None = None
        self.first_D = self.count_D = np.zeros(0, dtype=np.int64)
        if (laid := samples.flat()) is not None:
            self.flat, ends = laid
            self.count_D = np.diff(ends, prepend=0)
            self.first_D = ends - self.count_D
        if lengths is None:
            assert laid is not None, "only stored samples tell their own lengths"
            lengths = self.count_D
        elif len(samples) != len(lengths):
            raise self._disagree(f"{len(samples)} samples", len(lengths))
        elif laid is not None and np.any((self.count_D != lengths) & (self.count_D > 0)):
            document = int(np.flatnonzero((self.count_D != lengths) & (self.count_D > 0))[0])
            raise self._disagree(
                f"{self.count_D[document]} tokens of sample {document}", int(lengths[document])
            )
        self.offsets_D1: Ints = np.concatenate(
            [[0], np.cumsum(np.asarray(lengths, dtype=np.int64) + 1)]
        )
        if shard.tokens and int(self.offsets_D1[-1]) + 1 != shard.stream_bytes:
            raise CorruptData(
                "shard is not as long as the snapshot says",
                got=f"{int(self.offsets_D1[-1]) + 1} tokens with separators",
                wanted=shard.stream_bytes,
                where=shard.sha256,
            )

    def expect(self, documents: Ints) -> None:
        """Say which documents come next, in this order; begins with those that must be made."""
        if self.flat is None:
            self.samples.expect(list(dict.fromkeys(documents.tolist())))

    def met(self, start_P: Ints, size: int) -> tuple[Ints, Ints]:
        """Return, of stretches of ``size`` tokens of the framed stream, each document that each
        one meets: the number of the stretch, and the document's."""
        low = np.searchsorted(self.offsets_D1, start_P, side="right") - 1
        high = np.searchsorted(self.offsets_D1[:-1], start_P + size, side="left")
        count = high - low
        within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        return np.repeat(np.arange(len(start_P)), count), np.repeat(low, count) + within

    def features(self, document: int) -> dict[str, Array] | None:
        """Return the document's features, or None where it is bad."""
        try:
            return self.samples.features(document)
        except CorruptData as error:
            self.bad.setdefault(document, error.what)
            return None

    def tokens(self, document: int) -> Array | None:
        """Return the document's tokens, none for one of features only; None where it is bad."""
        try:
            tokens = self.samples.tokens(document)
        except CorruptData as error:
            self.bad.setdefault(document, error.what)
            return None
        wanted = int(self.offsets_D1[document + 1] - self.offsets_D1[document]) - 1
        if len(tokens) not in (0, wanted):  # 0: a sample of features only
            raise InvalidInput(
                "a transform changed a sample's length",
                got=len(tokens),
                wanted=f"{wanted}, as its shard's index says",
                where=f"{self.shard.sha256}#{document}",
                do="Change lengths when the snapshot is built; batches are planned from them.",
            )
        return tokens

    def _disagree(self, got: str, wanted: int) -> CorruptData:
        return CorruptData(
            "shard and its index disagree", got=got, wanted=wanted, where=self.shard.sha256
        )
