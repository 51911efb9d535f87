"""Agents on nodes: started where missing, adopted where running, brought back where they die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from paceline.cluster import Fleet
from paceline.config import Runtime
from paceline.errors import NotReady
from tests.cluster.conftest import (
    AGENT,
    AGENT_ARGV,
    eventually,
    run_on,
)

pytestmark = pytest.mark.xdist_group("dask")

RANK = Path(__file__).with_name("stand_in_rank.py")


def test_agents_are_kept_adopted_and_die_with_their_node(
    cluster: Runtime, connected: Fleet
) -> None:
    # One story, because agents outlive a single test: node-2 has a resident agent before we come.
    with subprocess.Popen(
        [sys.executable, "-S", str(AGENT), "--state", str(cluster.state_dir),
         "--worker-id", "node-2",
         "--host", "node-2", "--rack", "rack-1", "--listen", "127.0.0.1:0"],
    ) as resident:  # fmt: skip
        try:
            _story(cluster, connected, resident)
        finally:
            resident.kill()


def _story(cluster: Runtime, connected: Fleet, resident: subprocess.Popen[bytes]) -> None:
    eventually((cluster.node_dir("node-2") / "agent.json").exists)

    agents = connected.ensure_agents(agent_argv=AGENT_ARGV)
    assert list(agents) == ["node-0", "node-1", "node-2"]
    assert [each.adopted for each in agents.values()] == [False, False, True]
    assert agents["node-2"].pid == resident.pid
    assert agents == connected.ensure_agents(agent_argv=AGENT_ARGV)  # asked twice, done once

    psutil.Process(agents["node-0"].pid).kill()
    eventually(lambda: not psutil.pid_exists(agents["node-0"].pid))
    again = connected.ensure_agents(["node-0"], agent_argv=AGENT_ARGV)["node-0"]
    assert again.pid != agents["node-0"].pid
    assert again.incarnation == agents["node-0"].incarnation + 1

    worker = run_on(connected, "node-1", os.getpid, timeout_s=20)
    psutil.Process(worker).kill()
    eventually(lambda: not psutil.pid_exists(agents["node-1"].pid))
    announced = cluster.node_dir("node-1") / "agent.json"
    # nobody asks again: the worker that takes the dead one's place brings the agent back
    eventually(lambda: json.loads(announced.read_text())["pid"] != agents["node-1"].pid)
    back = connected.ensure_agents(["node-1"], agent_argv=AGENT_ARGV)["node-1"]
    assert back.pid == json.loads(announced.read_text())["pid"]

    resident.kill()
    resident.wait()

    def replaced() -> bool:
        found = connected.ensure_agents(["node-2"], agent_argv=AGENT_ARGV)["node-2"]
        return found.pid != resident.pid and not found.adopted

    eventually(replaced)


def test_an_agent_that_cannot_start_says_why(connected: Fleet, cluster: Runtime) -> None:
    from paceline.cluster import AgentKeeper, AgentOrder

    directory = cluster.state_dir / "elsewhere"
    broken = (sys.executable, "-S", "-c", "raise SystemExit('no such disk')")
    keeper = AgentKeeper(AgentOrder(worker_id="node-7", node_dir=str(directory), argv=broken))

    def said() -> bool:
        with pytest.raises(NotReady) as refused:
            keeper.wait(1.0)
        return "no such disk" in str(refused.value)

    eventually(said)
    keeper._run_own = threading.Event().wait  # it restarts nothing from now on
