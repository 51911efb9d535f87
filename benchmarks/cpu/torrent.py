"""libtorrent: a seeder and N peers that all know each other, a version 2 torrent (SHA-256)."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.cpu.stage import Nodes, Order, delivery

# The cheapest of a sweep on loopback.
TUNED = {"piece_kib": 1024, "super_seeding": True, "sequential": False, "settings": {}}


def conduct(order: Order, **changed: object) -> None:
    """Run the swarm; ``changed`` replaces parts of TUNED."""
    tuned = {**TUNED, **changed}
    torrent = order.scratch / "model.torrent"
    _make_torrent(order, tuned["piece_kib"], torrent)
    addresses = [f"127.77.0.{number + 1}" for number in range(order.receivers + 1)]
    with Nodes() as nodes:
        for number, address in enumerate(addresses):
            seed = number == 0
            save_path = order.source.parent  # a torrent of one file has no directory
            if not seed:
                save_path = order.copy(f"node-{number - 1}").parent
            nodes.start("benchmarks.peers.torrent_node")
            said = {
                "torrent": str(torrent),
                "seed": seed,
                "save_path": str(save_path),
                "address": address,
                "peers": [each for each in addresses if each != address],
            }
            settings = {**tuned["settings"], "outgoing_interfaces": address}
            nodes.tell(number, json.dumps({**tuned, **said, "settings": settings}))
        for number in range(len(nodes)):
            nodes.hear(number)
        copies = [order.copy(f"node-{number}") for number in range(order.receivers)]
        with delivery(copies, order.sha256):
            for number in range(1, len(nodes)):
                nodes.tell(number, "go")
            for number in range(1, len(nodes)):
                nodes.hear(number)
            for number in range(1, len(nodes)):
                nodes.tell(number, "end")  # what is verified must be in the files
            for number in range(1, len(nodes)):
                nodes.hear(number)


def _make_torrent(order: Order, piece_kib: int, path: Path) -> None:
    import libtorrent as lt

    files = lt.list_files(str(order.source.parent))
    made = lt.create_torrent(files, piece_kib * 1024, lt.create_torrent.v2_only)
    lt.set_piece_hashes(made, str(order.source.parent.parent))
    path.write_bytes(lt.bencode(made.generate()))
