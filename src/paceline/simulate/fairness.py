"""Max-min fair rates of flows over shared links: what a second of virtual network looks like.

Progressive filling (Bertsekas and Gallager, Data Networks, 6.5), with one addition: a flow that has
caught up with the growing edge of what its source receives *follows* that flow and is never faster.
Only numbers: it knows no workers, pieces or time.

Instead of one bottleneck a round, every resource that is a bottleneck among its neighbours freezes
its flows at once; thousands of workers take a handful of rounds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

ROUNDS = 64  # then whoever is left gets the share it has for certain: safe, a little slow
_TINY = 1e-9


def max_min_rates(capacity: Floats, uses: Ints, leader: Ints, stopped: Flags) -> Floats:
    """Return each flow's rate.

    ``capacity[r]`` is what resource r carries (inf: no limit), ``uses[:, f]`` are the resources of
    flow f (name one without a limit where it has fewer), ``leader[f]`` is the flow it follows or
    -1 (no cycles), and ``stopped[f]`` flows carry nothing.
    """
    flows = uses.shape[1]
    rate = np.zeros(flows)
    frozen = stopped.copy()
    residual = capacity.astype(np.float64, copy=True)
    jumps = _jump_tables(leader)
    for turn in range(ROUNDS):
        live = np.flatnonzero(~frozen)
        if not live.size:
            break
        mine = uses[:, live]
        count = np.bincount(mine.ravel(), minlength=residual.size)
        share = np.full(residual.size, np.inf)
        used = count > 0
        share[used] = np.maximum(residual[used], 0.0) / count[used]
        own = share[mine].min(axis=0)
        above, fixed = _along_paths(jumps, frozen, rate, live, own)
        # Nobody is faster than its path to the root allows; where that is settled, so is it.
        wish = np.minimum(above, fixed)
        lowest = np.full(residual.size, np.inf)
        for row in mine:
            np.minimum.at(lowest, row, wish)
        tight = used & (lowest >= share * (1 - _TINY)) & np.isfinite(share)
        now = tight[mine].any(axis=0) | (fixed <= above)
        if turn == ROUNDS - 1:
            now[:] = True
        chosen = live[now]
        rate[chosen] = wish[now]
        frozen[chosen] = True
        for row in mine[:, now]:
            residual -= np.bincount(row, weights=wish[now], minlength=residual.size)
    return rate


def _jump_tables(leader: Ints) -> list[Ints]:
    """Return for 1, 2, 4, … steps up who is there; ``len(leader)`` stands above every root."""
    if not (leader >= 0).any():
        return []
    end = leader.size
    table = np.append(np.where(leader >= 0, leader, end), end)
    tables = []
    while (table[:-1] != end).any():
        tables.append(table)
        table = table[table]
    return tables


def _along_paths(
    jumps: list[Ints], frozen: Flags, rate: Floats, live: Ints, own: Floats
) -> tuple[Floats, Floats]:
    """Return, for each live flow, the least share of the live and the least rate of the settled
    flows on its path to the root, itself included.
    """
    if not jumps:
        return own, np.full(own.size, np.inf)
    above = np.full(frozen.size + 1, np.inf)
    fixed = np.full(frozen.size + 1, np.inf)
    above[live] = own
    fixed[:-1][frozen] = rate[frozen]
    for table in jumps:
        np.minimum(above, above[table], out=above)
        np.minimum(fixed, fixed[table], out=fixed)
    return above[live], fixed[live]
