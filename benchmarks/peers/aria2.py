"""aria2 in a race: as a BitTorrent swarm (version 1: it knows no 2), and as N S3 downloads."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import boto3
from botocore.config import Config

from benchmarks.peers.nodes import Nodes
from benchmarks.peers.torrent import make_torrent
from benchmarks.race.case import Case, Outcome
from benchmarks.testbed import S3Origin
from benchmarks.testbed.bed import CORE_ADDRESS
from benchmarks.testbed.origin import wait_for_listener
from paceline.errors import MissingTool
from paceline.storage import parse_url

NODE = Path(__file__).with_name("aria2_node.py")
TRACKER = Path(__file__).with_name("tracker.py")
TRACKER_PORT = 6969
TUNED = {"piece_kib": 256, "max_peers": 0, "options": []}
SWEEP = (
    {},
    {"piece_kib": 64},
    {"piece_kib": 1024},
    {"max_peers": 4},
    {"options": ["--bt-prioritize-piece=head=1M,tail=1M"]},
    {"options": ["--bt-request-peer-speed-limit=5M"]},
)
TUNED_S3 = {"connections": 4, "split_kib": 1024}
SWEEP_S3 = ({}, {"connections": 1}, {"connections": 2}, {"connections": 16})


def _require() -> None:
    if shutil.which("aria2c") is None:
        raise MissingTool(
            "aria2c is not installed", do="apt-get install aria2, or leave its rows out."
        )


def run_aria2(case: Case) -> Outcome:
    """Return how a swarm of aria2 clients did, seeded by one at the origin."""
    _require()
    tuned = {**TUNED, **case.settings}
    torrent = case.scratch / "model.torrent"
    make_torrent(case.model, tuned["piece_kib"], torrent, v1=True)
    tracker = case.bed.popen(
        "core",
        [sys.executable, str(TRACKER), CORE_ADDRESS, str(TRACKER_PORT)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_listener(tracker, case.bed.core, TRACKER_PORT, 10.0)
        return _swarm(case, tuned, torrent)
    finally:
        tracker.kill()
        tracker.wait()


def _swarm(case: Case, tuned: dict[str, object], torrent: Path) -> Outcome:
    options = [
        *("--enable-dht=false", "--enable-dht6=false", "--bt-enable-lpd=false"),
        *("--enable-peer-exchange=true", "--listen-port=6881", "--seed-ratio=0"),
        *(f"--bt-tracker=http://{CORE_ADDRESS}:{TRACKER_PORT}/announce", "--bt-tracker-interval=2"),
        *(f"--bt-max-peers={tuned['max_peers']}", "--file-allocation=falloc"),
        *("--bt-request-peer-speed-limit=100M", "--max-upload-limit=0", "--summary-interval=0"),
        *tuned["options"],
    ]  # fmt: skip
    nodes = Nodes(case)
    seeder = {
        "seed": True,
        "save_path": str(case.model.directory.parent),
        "done": str(case.scratch / "seeder"),
        "options": [*options, "--bt-seed-unverified=true", str(torrent)],
    }
    nodes.start("origin", [sys.executable, NODE], seeder)
    for host in case.bed.hosts:
        save_path = nodes.copy(host.index).parent
        save_path.mkdir(parents=True)
        done, hook = save_path / "done", save_path / "hook"
        hook.write_text(f"#!/bin/sh\n: > {done}\n")
        hook.chmod(0o700)
        mine = [*options, f"--on-bt-download-complete={hook}", str(torrent)]
        order = {"seed": False, "save_path": str(save_path), "done": str(done), "options": mine}
        nodes.start(host.index, [sys.executable, NODE], order)
    return nodes.race({"tuned": tuned})


def run_aria2_s3(case: Case) -> Outcome:
    """Return how N hosts did that each fetch everything from S3 with aria2c."""
    _require()
    tuned = {**TUNED_S3, **case.settings}
    origin = S3Origin(case.bed, case.model.root)
    try:
        client = boto3.session.Session().client(
            "s3",
            endpoint_url=origin.endpoint_url,
            aws_access_key_id=origin.access_key,
            aws_secret_access_key=origin.secret_key,
            region_name="us-east-1",
            config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
        )
        bucket, prefix = parse_url(case.model.url)
        urls = [
            client.generate_presigned_url(
                "get_object", Params={"Bucket": bucket, "Key": f"{prefix}/{file.path}"}
            )
            for file in case.model.manifest.files
        ]
        nodes = Nodes(case)
        for host in case.bed.hosts:
            copy = nodes.copy(host.index)
            copy.mkdir(parents=True)
            listed = copy.parent / "urls"
            listed.write_text(
                "".join(
                    f"{url}\n out={file.path}\n"
                    for url, file in zip(urls, case.model.manifest.files, strict=True)
                )
            )
            options = [
                *(f"--input-file={listed}", "--max-concurrent-downloads=1"),
                *(f"--split={tuned['connections']}", f"--min-split-size={tuned['split_kib']}K"),
                *(f"--max-connection-per-server={tuned['connections']}",),
                *("--file-allocation=falloc", "--use-head=false"),
            ]  # fmt: skip
            done = copy.parent / "never"
            order = {"seed": False, "save_path": str(copy), "done": str(done), "options": options}
            nodes.start(host.index, [sys.executable, NODE], order)
        return nodes.race({"tuned": tuned})
    finally:
        origin.stop()
