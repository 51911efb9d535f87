"""The least that a chain of Python processes costs: the yardstick of "limited links, CPU".

As ``benchmarks/cpu/floor.py``, one process a host: blocks of 512 KiB, BLAKE3, one file, pieces of
1 MiB; no protocol, no piece log, no faults, no membership.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.peers.nodes import Nodes
from benchmarks.race.case import Case, Outcome
from benchmarks.testbed.bed import ORIGIN_ADDRESS
from paceline.relay.transport import issue_identity, make_authority

NODE = Path(__file__).with_name("chain_node.py")


def run_chain(case: Case) -> Outcome:
    """Return how the chain did; ``tls`` in ``case.settings``: with Python's ssl between hosts."""
    pki = ""
    if case.settings.get("tls"):
        pki = str(case.scratch / "pki")
        issue_identity(make_authority(case.scratch / "pki"), "node", case.scratch / "pki")
    sizes = [[file.path, file.size] for file in case.model.manifest.files]
    nodes, before = Nodes(case), None
    for place in ("origin", *(host.index for host in case.bed.hosts)):
        copy, address = case.model.directory, ORIGIN_ADDRESS
        if isinstance(place, int):
            copy, address = nodes.copy(place), case.bed.hosts[place].address
            copy.mkdir(parents=True)
        order = {"copy": str(copy), "files": sizes, "address": address, "from": before, "pki": pki}
        nodes.start(place, [sys.executable, NODE], order)
        before = address
    return nodes.race({})
