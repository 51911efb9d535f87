"""What a node's Dask worker does besides calls: it reports its machine and keeps an agent running.

The thread adopts an agent that already runs (a resident one), otherwise starts one, and restarts it
when it dies. An agent is found by ``<node_dir>/agent.json`` {pid, address, incarnation} and must
accept connections at that address. The thread itself forks, because the kernel's parent-death
signal follows the forking thread: the agent dies with the worker. This module does not depend on
what an agent does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.cluster.addresses import AgentInfo, accepts, machine
from paceline.cluster.processes import dying_with_us, last_line, node_environment
from paceline.config import this_node
from paceline.errors import NotReady
from paceline.system import PYTHON, own_program, write_private

log = logging.getLogger(__name__)

AGENT_FILE = "agent.json"
AGENT = (PYTHON, "-m", "paceline.cli.main", "agent")
REPORT = "paceline"  # the machine, in the scheduler's information on a worker
WANTED_FILE = "agent-wanted.json"  # the order, read by the worker that replaces a dead one
LOG_LIMIT_BYTES = 16 * 1024 * 1024
WATCH_S = 0.1
READY_DEADLINE_S = 20.0
ADOPTED_GRACE_S = 2.0  # time for a resident agent's own supervisor to restart it
BACKOFF_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
STEADY_S = 30.0  # an agent that ran this long resets its backoff
PROBE_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class AgentOrder:
    """The agent that a node should have."""

    worker_id: str
    node_dir: str
    argv: tuple[str, ...]

    @classmethod
    def of_this_node(cls, agent_argv: Sequence[str], host: str) -> AgentOrder:
        """Return the order for the node of this process; the agent listens at ``host``."""
        node = this_node()
        argv = [*own_program(agent_argv), "--state", str(node.state_dir)]
        argv += ["--worker-id", node.worker_id, "--listen", f"{host}:0", "--die-with-parent"]
        for label, value in node.labels.items():
            argv += [f"--{label}", value]
        return cls(worker_id=node.worker_id, node_dir=str(node.directory), argv=tuple(argv))


class AgentKeeper:
    """Keeps one agent running, in a thread of its own."""

    def __init__(self, order: AgentOrder) -> None:
        self.order = order
        self.directory = Path(order.node_dir)
        self.log_path = self.directory / "agent.log"
        self._info: AgentInfo | None = None
        self._problem = ""
        threading.Thread(target=self._keep, name=f"agent-{order.worker_id}", daemon=True).start()

    def wait(self, timeout_s: float) -> AgentInfo:
        """Return the agent once it accepts connections; NotReady carries its last log line."""
        deadline = time.monotonic() + timeout_s
        while True:
            info = self._info
            if info is not None and _answers(info.address) and _is_alive(info.pid):
                return info
            if time.monotonic() >= deadline:
                raise NotReady(
                    "agent did not get ready",
                    got=self._problem or last_line(self.log_path) or "silence",
                    wanted="an answer from the address in agent.json",
                    where=self.log_path,
                    do="Read that log.",
                )
            time.sleep(0.05)

    def _keep(self) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            try:
                if (found := find_agent(self.order)) is not None:
                    self._info, self._problem = found, ""
                    self._follow(found.pid, None)
                    self._info = None
                    if self._comes_back():
                        continue
                self._run_own()
            except Exception as error:
                log.exception("agent cannot be kept worker=%s", self.order.worker_id)
                self._problem = repr(error)
            self._info = None
            failures = 0 if time.monotonic() - began > STEADY_S else failures + 1
            pause = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
            time.sleep(pause * random.uniform(0.7, 1.3))

    def _run_own(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.log_path.exists() and self.log_path.stat().st_size > LOG_LIMIT_BYTES:
            self.log_path.replace(self.log_path.with_suffix(".log.1"))
        with self.log_path.open("ab") as output:
            process = subprocess.Popen(
                dying_with_us(self.order.argv),
                env=node_environment(),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        log.info("agent started worker=%s pid=%d", self.order.worker_id, process.pid)
        deadline = time.monotonic() + READY_DEADLINE_S
        try:
            while process.poll() is None:
                info = read_agent(self.order)
                if info is not None and info.pid == process.pid and _answers(info.address):
                    self._info, self._problem = info.model_copy(update={"adopted": False}), ""
                    self._follow(process.pid, process)
                    break
                if time.monotonic() > deadline:
                    self._problem = (
                        f"not ready after {READY_DEADLINE_S:.0f} s: {last_line(self.log_path)}"
                    )
                    break
                time.sleep(WATCH_S)
        finally:
            if process.poll() is None:
                process.kill()
            code = process.wait()
            if not self._problem:
                self._problem = f"ended with {code}: {last_line(self.log_path)}"
            log.warning("agent ended worker=%s code=%d", self.order.worker_id, code)

    def _follow(self, pid: int, process: subprocess.Popen[bytes] | None) -> None:
        while process.poll() is None if process else _is_alive(pid):
            time.sleep(WATCH_S)

    def _comes_back(self) -> bool:
        deadline = time.monotonic() + ADOPTED_GRACE_S
        while time.monotonic() < deadline:
            if find_agent(self.order) is not None:
                return True
            time.sleep(WATCH_S)
        return False


_keepers: dict[str, AgentKeeper] = {}
_keepers_lock = threading.Lock()


def ensure_agent(agent_argv: Sequence[str], timeout_s: float) -> AgentInfo:
    """Return this node's agent, adopted or started, and keep it running from now on."""
    from distributed import get_worker
    from distributed.comm import get_address_host

    order = AgentOrder.of_this_node(agent_argv, get_address_host(get_worker().address))
    return _kept(order).wait(timeout_s)


def _kept(order: AgentOrder) -> AgentKeeper:
    with _keepers_lock:
        keeper = _keepers.get(order.worker_id)
        if keeper is None:
            Path(order.node_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(Path(order.node_dir) / WANTED_FILE, json.dumps(asdict(order)).encode())
            keeper = _keepers[order.worker_id] = AgentKeeper(order)
        return keeper


def dask_setup(worker: Any) -> None:
    """Add the machine to what ``worker`` reports when it registers, and start the agent of a node
    that gets one with its worker, or had one before (Dask calls this as a preload)."""
    from distributed.comm import get_address_host

    found = machine().model_dump(mode="json")

    async def report(worker: Any) -> dict[str, Any]:
        if this_node().own_agent:  # here, because it listens where the worker does
            _kept(AgentOrder.of_this_node(AGENT, get_address_host(worker.address)))
        return found

    worker.startup_information[REPORT] = report
    if (wanted := this_node().directory / WANTED_FILE).is_file():
        raw = json.loads(wanted.read_bytes())
        order = AgentOrder(
            worker_id=raw["worker_id"], node_dir=raw["node_dir"], argv=tuple(raw["argv"])
        )
        with _keepers_lock:
            _keepers[order.worker_id] = AgentKeeper(order)


def read_agent(order: AgentOrder) -> AgentInfo | None:
    """Return what the node's agent last announced, whether it runs or not."""
    try:
        raw = json.loads((Path(order.node_dir) / AGENT_FILE).read_bytes())
        return AgentInfo(
            worker_id=order.worker_id,
            pid=raw["pid"],
            address=raw["address"],
            incarnation=raw["incarnation"],
            adopted=True,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find_agent(order: AgentOrder) -> AgentInfo | None:
    """Return the agent that runs for this node already, or None."""
    info = read_agent(order)
    if info is None or not _is_alive(info.pid) or not _is_for(info.pid, order.worker_id):
        return None
    return info if _answers(info.address) else None


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat[stat.rindex(b")") + 2 : stat.rindex(b")") + 3] not in b"ZX"


def _is_for(pid: int, worker_id: str) -> bool:
    # pids are reused: the process's command line must name this node
    with contextlib.suppress(OSError):
        return worker_id.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return port.isdecimal() and accepts(host, int(port), PROBE_TIMEOUT_S)
