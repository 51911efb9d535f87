"""libtorrent in a race: one seeder at the origin, every host a peer that knows all others.

Version 2 torrents by default, because only they verify by SHA-256 as Paceline does.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.peers.nodes import Nodes
from benchmarks.race.case import Case, Model, Outcome
from benchmarks.testbed.bed import ORIGIN_ADDRESS

NODE = Path(__file__).with_name("torrent_node.py")
KIB = 1024
# The best of the sweep below, 8 hosts at 50 Mbit/s; see docs/measurements/relay-links.md.
TUNED = {"piece_kib": 256, "super_seeding": True, "sequential": False, "settings": {}}
SWEEP = (
    {},
    {"super_seeding": False},
    {"piece_kib": 64},
    {"piece_kib": 1024},
    {"sequential": True},
    {"settings": {"unchoke_slots_limit": 2}},
    {"settings": {"unchoke_slots_limit": 4}},
    {"settings": {"predictive_piece_announce": 500}},
    {"settings": {"strict_super_seeding": True}},
    {"settings": {"request_queue_time": 3}},
)


def make_torrent(model: Model, piece_kib: int, path: Path, *, v1: bool = False) -> None:
    """Write the torrent of a model's files to ``path``: version 2, or 1 for those who know no 2."""
    import libtorrent as lt

    files = lt.list_files(str(model.directory))
    flag = lt.create_torrent.v1_only if v1 else lt.create_torrent.v2_only
    made = lt.create_torrent(files, piece_kib * KIB, flag)
    lt.set_piece_hashes(made, str(model.directory.parent))
    path.write_bytes(lt.bencode(made.generate()))


def run_torrent(case: Case) -> Outcome:
    """Return how the swarm did; ``case.settings`` changes TUNED."""
    tuned = {**TUNED, **case.settings}
    torrent = case.scratch / "model.torrent"
    make_torrent(case.model, tuned["piece_kib"], torrent)
    everyone = [ORIGIN_ADDRESS, *(host.address for host in case.bed.hosts)]
    order = {
        "torrent": str(torrent),
        "settings": tuned["settings"],
        "super_seeding": tuned["super_seeding"],
        "sequential": tuned["sequential"],
    }
    nodes = Nodes(case)
    at_origin = {"seed": True, "save_path": str(case.model.directory.parent), "peers": []}
    nodes.start("origin", [sys.executable, NODE], {**order, **at_origin, "address": ORIGIN_ADDRESS})
    for host in case.bed.hosts:
        save_path = nodes.copy(host.index).parent
        save_path.mkdir(parents=True)
        mine = {
            "seed": False,
            "save_path": str(save_path),
            "address": host.address,
            "peers": [each for each in everyone if each != host.address],
        }
        nodes.start(host.index, [sys.executable, NODE], {**order, **mine})
    return nodes.race({"tuned": tuned})
