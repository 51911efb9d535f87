"""What monitors and people get to see."""

import re

from prometheus_client.parser import text_string_to_metric_families

from paceline.schemas import Deployment, DeploymentStatus, Labels, Topology, Worker
from paceline.telemetry import PAGE_FILES, PAGE_HEADERS, FleetMetrics, Snapshot, page_text


def snapshot() -> Snapshot:
    deployment = Deployment(
        deployment_id="dep-1", model_id="m", version="v1", status=DeploymentStatus.DISTRIBUTING,
        source_url="s3://b/m", manifest_digest="0" * 64, total_bytes=1000, total_chunks=1,
        total_pieces=1, target_workers=("node-0",), topology=Topology.CHAIN, epoch=1,
        max_failed=0.05, started_at=0, origin_bytes=400,
    )  # fmt: skip
    workers = [
        Worker(
            worker_id=f"node-{index}",
            hostname="h",
            labels=Labels(rack='r"\\\n'),
            address="a",
            available_storage=5,
            link_mbit=1,
            incarnation=1,
            alive=index == 0,
            bandwidth_in=12.5,
        )
        for index in range(2)
    ]
    return Snapshot(
        deployments=[deployment], progress={"dep-1": 0.5}, workers=workers, beats=7,
        beats_refused=2, leader_epoch=3,
    )  # fmt: skip


def test_metrics_are_valid_prometheus_text_with_the_snapshots_figures():
    metrics = FleetMetrics(snapshot)
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }
    names = {name for name, _ in found}
    assert all(name.startswith("paceline_") for name in names)
    assert found["paceline_workers_alive", ()] == 1
    assert found["paceline_workers_lost", ()] == 1
    assert found["paceline_deployments", (("status", "distributing"),)] == 1
    assert found["paceline_deployments", (("status", "complete"),)] == 0
    assert found["paceline_coordinator_beats_total", (("taken", "yes"),)] == 7
    dep = (("deployment_id", "dep-1"), ("model_id", "m"), ("version", "v1"))
    assert found["paceline_deployment_progress_ratio", dep] == 0.5
    assert found["paceline_deployment_origin_bytes", dep] == 400
    rate = ("paceline_worker_bytes_per_second",)
    # The record escapes the line break: text of a worker has no control characters.
    label = (("direction", "in"), ("rack", 'r"\\\\n'), ("worker_id", "node-0"))
    assert found[*rate, label] == 12.5


def test_metrics_of_two_services_in_one_process_do_not_collide():
    assert FleetMetrics(snapshot).text() == FleetMetrics(snapshot).text()


def test_pages_load_from_and_send_the_token_to_their_own_server_only():
    policy = PAGE_HEADERS["Content-Security-Policy"]
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy, "nothing inline runs"
    for name in ("fleet.html", "docs.html"):
        page = page_text(name)
        loaded = re.findall(r"(?:src|href)=[\"'](?!data:|#)/pages/([^\"']+)", page)
        assert len(loaded) == len(re.findall(r"(?:src|href)=[\"'](?!data:|#)", page)) == 2
        assert set(loaded) <= set(PAGE_FILES)
        assert not re.search(r"<style|<script(?! type=\"module\" src=)|\son\w+=|\sstyle=", page)
    for name in ("fleet.html", "docs.html", *PAGE_FILES):
        text = page_text(name)
        urls = set(re.findall(r"https?://[^\s\"'`)]+", text))
        assert urls <= {"http://www.w3.org/2000/svg"}
        assert not re.search("innerHTML|outerHTML|insertAdjacent|document.write", text), (
            "names from the coordinator are text, never markup"
        )
        assert "location.search" not in text, "a token in the query would be logged"
    for name in ("fleet.js", "docs.js"):
        assert "location.hash" in page_text(name)
