"""Paceline itself: a source that has the model, and a chain of receivers, one process a node."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cpu.stage import TIMEOUT_S, Nodes, Order, delivery, hear, say
from paceline.manifest import Manifest, build_manifest, parse_manifest, write_manifest
from paceline.relay import RelayDriver
from paceline.relay.store import Store
from paceline.relay.transport import TlsSettings, Transport, issue_identity, make_authority
from paceline.schemas import Lane, Source, WorkerLanes, WorkerStatus
from tests.support.local_fleet import open_directory

ID, VERSION = "bench", "v1"


FINAL = Path("store/models") / ID / VERSION


def names_of(order: Order) -> list[str]:
    """Return the names of the source and of the receivers, along the chain."""
    return ["source", *(f"node-{number}" for number in range(order.receivers))]


def seed(order: Order, mtls: bool) -> Manifest:
    """Publish the model in the source's store, and issue identities; return the manifest."""
    seeded = order.scratch / "source" / FINAL
    shutil.copytree(order.source.parent, seeded)
    manifest = build_manifest(
        seeded, model_id=ID, version=VERSION, link_mbit=10_000, piece_bytes=order.piece_bytes
    )
    write_manifest(seeded, manifest)
    if mtls:
        authority = make_authority(order.scratch / "pki")
        for name in names_of(order):
            issue_identity(authority, name, order.scratch / "pki")
    return manifest


def chain_lanes(names: Sequence[str], addresses: Sequence[str], manifest: Manifest) -> list[str]:
    """Return the lanes of each receiver, as JSON: the whole model from the one before it."""
    lanes = []
    for number, name in enumerate(names[1:]):
        upstream = Source(kind="worker", worker_id=names[number], address=addresses[number])
        whole = Lane(source=upstream, first_chunk=0, last_chunk=len(manifest.chunks) - 1)
        lanes.append(
            WorkerLanes(
                deployment_id="bench",
                epoch=1,
                manifest_digest=manifest.digest,
                worker_id=name,
                lanes=(whole,),
                origin_budget_bytes=0,
                piece_deadline_s=5.0,
            ).model_dump_json()
        )
    return lanes


def conduct(order: Order, transport: str, mtls: bool) -> None:
    """Run the source and the receivers."""
    names, manifest = names_of(order), seed(order, mtls)
    with Nodes() as nodes:
        addresses = []
        for name in names:
            number = nodes.start("benchmarks.cpu.relay", name, transport, int(mtls))
            nodes.tell(number, order.text())
            addresses.append(nodes.hear(number)["address"])
        lanes = chain_lanes(names, addresses, manifest)
        copies = [order.scratch / name / FINAL / order.source.name for name in names[1:]]
        with delivery(copies, order.sha256):
            for number, mine in enumerate(lanes):
                nodes.tell(number + 1, mine)
            for number in range(1, len(names)):
                nodes.hear(number)


def node(name: str, kind: str, mtls: str, host: str = "127.0.0.1") -> None:
    """Be one node, whose peer port listens on ``host``."""
    order = Order.parse(hear())
    pki = order.scratch / "pki"
    tls = None
    if int(mtls):
        tls = TlsSettings(ca=pki / "ca.pem", cert=pki / f"{name}.pem", key=pki / f"{name}-key.pem")
    driver = RelayDriver(
        worker_id=name,
        store=Store(order.scratch / name / "store"),
        transport=_transport(kind, tls),
        open_source=open_directory,
        host=host,
    )
    driver.start()
    say(address=driver.server.address)
    lanes = WorkerLanes.model_validate_json(hear())
    manifest = (order.scratch / "source" / FINAL / "manifest.json").read_bytes()
    driver.deploy(lanes, parse_manifest(manifest))
    final = (WorkerStatus.COMPLETE, WorkerStatus.FAILED, WorkerStatus.VERIFICATION_FAILED)
    driver.wait(lambda beats: any(beat.status in final for beat in beats), TIMEOUT_S)
    (beat,) = driver.beats()
    if beat.status is not WorkerStatus.COMPLETE:
        raise RuntimeError(f"{name}: {beat.failure}")
    say(finished=True)
    hear()


def _transport(kind: str, tls: TlsSettings | None) -> Transport:
    if kind == "grpc":
        from paceline.relay.transport import GrpcTransport

        return GrpcTransport("bench", tls)
    from paceline.relay.transport import TcpTransport

    return TcpTransport("bench", tls)


if __name__ == "__main__":
    node(*sys.argv[1:])
