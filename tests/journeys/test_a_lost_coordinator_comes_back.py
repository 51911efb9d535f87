"""The only coordinator and its etcd are lost with their disk, and come back from a snapshot.

Types the blocks on etcd of docs/how-to/back-up-and-restore.md; nothing is typed on a node.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.journeys.fleet import ENVIRONMENT, bring_up, name_of, rclone_s3, start_coordinator
from tests.journeys.guide import commands
from tests.journeys.hosts import site, until
from tests.journeys.stores import Authority, start_etcd

pytestmark = [pytest.mark.netns, pytest.mark.nightly, pytest.mark.timeout(900)]

TYPED = commands("how-to/back-up-and-restore.md")


def test_agents_rejoin_a_coordinator_whose_etcd_was_restored(
    control_software: Path, tmp_path: Path
) -> None:
    with site(control_software, hosts=3) as bed, rclone_s3(bed, tmp_path) as s3_url:
        control = bed.hosts[0]
        (tmp_path / "authority").mkdir()
        authority = Authority(tmp_path / "authority")
        authority.issue(control)
        (etcd,) = start_etcd([control], tmp_path)
        pki = "/home/user/pki"
        fleet = bring_up(
            *(bed, tmp_path, s3_url, ENVIRONMENT),
            "control.coordination=etcd",
            f'control.etcd_endpoints=["{etcd}"]',
            *(f"control.etcd_{each}={pki}/{each}.pem" for each in ("ca", "cert", "key")),
        )
        for node in fleet.nodes:
            fleet.agent(node, **ENVIRONMENT)
        admin = fleet.ci_token(control)
        until(lambda: fleet.alive(admin) == 2, "every node joins")
        digest = fleet.publish("1", 4, ENVIRONMENT)
        made = fleet.distribute(control, admin, "1", fleet.nodes).ok()
        deployment = made.out.split('"deployment_id":"')[1].split('"')[0]

        def is_complete() -> bool:
            found = fleet.ended(control, admin, deployment)
            return found is not None and found["status"] == "complete"

        until(is_complete, "the deployment is complete", 60)
        name, peer = f"e{control.index}", f"https://{control.address}:2380"
        env = {
            **{"ETCD": etcd, "PKI": pki, "STATE": ".paceline", "PREFIX": "/paceline/default"},
            **{"NAME": name, "PEER": peer, "CLUSTER": f"{name}={peer}"},
        }

        def typed(block: str) -> None:
            fleet.control.run("bash", "-euc", TYPED[block], env=env).ok()

        typed("backup-etcd")
        control.copy("backup", fleet.nodes[0])  # to any other machine
        trusted = control.run("cat", "ca.pem").ok().out

        fresh = bed.replace(control)
        fleet = replace(fleet, control=fresh)
        assert fresh.run("ls", "-A").ok().out == "", "its disk is empty"
        assert fleet.holds(fleet.nodes[0], "1") == digest
        fleet.nodes[0].copy("backup", fresh)
        fresh.write("ca.pem", trusted)
        authority.issue(fresh)
        typed("restore-etcd")
        start_etcd([fresh], tmp_path)
        typed("raise-epoch")
        start_coordinator(fresh, tmp_path, ENVIRONMENT)
        until(lambda: "leads" in fresh.run("paceline", "status").out, "it leads", 30)
        until(lambda: fleet.alive(admin) == 2, "every node is back, with the old token", 60)
        found = fleet.ended(fresh, admin, deployment)
        assert found is not None and found["status"] == "complete", "what was acknowledged"
        workers = fleet.call(admin, "/workers").ok().out
        assert all(name_of(each) in workers for each in fleet.nodes)

        second = fleet.publish("2", 4, ENVIRONMENT)
        fleet.distribute(fresh, admin, "2", fleet.nodes).ok()

        def has_second() -> bool:
            place = f"state/nodes/{name_of(fleet.nodes[1])}/store/models/acme-7b/2/w"
            return second in fleet.nodes[1].run("sha256sum", place).out

        until(has_second, "a new deployment works", 60)
