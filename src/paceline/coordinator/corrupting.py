"""Who corrupts what it sends: whose share of corrupt pieces stands out from the others'.

A bad network corrupts a little of everybody's pieces, a bad worker much of its own. Pure: counts go
in, names come out; it knows neither edges nor plans.
"""

from __future__ import annotations

from bisect import bisect_left
from math import sqrt

from paceline.coordinator.settings import Patience

SENDER_PIECES = 20  # a sender of fewer says nothing about what is usual
MANY = 100  # senders; of so many they are not judged at each tick
BEYOND_CHANCE = 5.0  # standard deviations
ALONE = 4  # times as many corrupt pieces, of a sender that nobody can be compared with


class Senders:
    """The senders of one deployment; at most ``most`` of them are called corrupting."""

    def __init__(self, patience: Patience, most: int) -> None:
        self._patience, self._most = patience, most
        self.quarantined: set[str] = set()
        self._pieces: dict[str, list[int]] = {}  # that matched, that did not
        self._count_again = False
        self._in_doubt = False  # somebody may be corrupting: what others send will tell
        self._count_s = float("-inf")

    def take(self, source: str, matched: int, corrupt: int) -> None:
        """Take what a reader found of what ``source`` sent, beyond what it said before."""
        if matched or corrupt:
            sender = self._pieces.setdefault(source, [0, 0])
            sender[0] += matched
            sender[1] += corrupt
            self._count_again = self._count_again or corrupt > 0 or self._in_doubt

    def close(self) -> None:
        """Forget what was counted; who is quarantined stays so."""
        self._pieces, self._count_again = {}, False

    def judge(self, now_s: float) -> list[tuple[str, dict[str, object]]]:
        """Return who is quarantined from now on, each with the reason, the worst first."""
        if not self._count_again or now_s < self._count_s:
            return []
        self._count_again = False
        self._count_s = now_s + len(self._pieces) // MANY / 10  # counting 10,000 takes 5 ms
        return self._judge()

    def _judge(self) -> list[tuple[str, dict[str, object]]]:
        patience = self._patience
        known = {
            name: (corrupt, matched + corrupt)
            for name, (matched, corrupt) in self._pieces.items()
            if name not in self.quarantined
            and (matched + corrupt >= SENDER_PIECES or corrupt >= patience.corrupt_pieces)
        }
        shares = {name: corrupt / judged for name, (corrupt, judged) in known.items()}
        ordered = sorted(shares.values())
        all_corrupt, all_judged = (
            sum(column) for column in zip((0, 1), *known.values(), strict=True)
        )
        found = []
        self._in_doubt = False
        for name in sorted(shares, key=lambda each: (-shares[each], each)):
            corrupt, judged = known[name]
            if shares[name] <= patience.corrupt_share or len(self.quarantined) >= self._most:
                break
            if corrupt < patience.corrupt_pieces or name.startswith("origin:"):
                continue
            self._in_doubt = True
            if len(known) == 1 and corrupt < ALONE * patience.corrupt_pieces:
                continue  # nobody to compare it with, yet
            usual = _median_without(ordered, shares[name])
            if shares[name] <= patience.corrupt_factor * usual:
                continue
            # Where one piece in a hundred is corrupt anyway, some sender of thousands has four bad
            # ones among its first sixty: that many must be beyond chance, not beyond the usual.
            chance = judged * max(usual, (all_corrupt - corrupt) / (all_judged - judged))
            if corrupt < patience.corrupt_pieces + chance + BEYOND_CHANCE * sqrt(chance):
                continue
            self.quarantined.add(name)
            why: dict[str, object] = {
                "corrupt_pieces": corrupt,
                "share": round(shares[name], 4),
                "usual_share": round(usual, 4),
            }
            found.append((name, why))
        return found


def _median_without(ordered: list[float], one: float) -> float:
    """Return the median of ``ordered`` without ``one`` of its members; 0 where that leaves none."""
    middle = (len(ordered) - 2) // 2
    if middle < 0:
        return 0.0
    return ordered[middle if middle < bisect_left(ordered, one) else middle + 1]
