"""Every host for itself: N parallel downloads from S3 with boto3, what people do first."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.peers.nodes import Nodes
from benchmarks.race.case import Case, Outcome
from benchmarks.testbed import S3Origin
from paceline.storage import parse_url

NODE = Path(__file__).with_name("s3_node.py")
TUNED = {"connections": 4, "part_kib": 8192}
SWEEP = ({}, {"connections": 1}, {"connections": 10}, {"part_kib": 1024})


def run_s3(case: Case) -> Outcome:
    """Return how N hosts did that each fetch everything from S3 with boto3."""
    tuned = {**TUNED, **case.settings}
    origin = S3Origin(case.bed, case.model.root)
    try:
        bucket, prefix = parse_url(case.model.url)
        nodes = Nodes(case)
        for host in case.bed.hosts:
            copy = nodes.copy(host.index)
            copy.mkdir(parents=True)
            order = {
                **tuned,
                "endpoint_url": origin.endpoint_url,
                "access_key": origin.access_key,
                "secret_key": origin.secret_key,
                "bucket": bucket,
                "keys": [f"{prefix}/{file.path}" for file in case.model.manifest.files],
                "save_path": str(copy),
            }
            nodes.start(host.index, [sys.executable, NODE], order)
        return nodes.race({"tuned": tuned})
    finally:
        origin.stop()
