"""Kills and freezes the coordinator's leader under load, again and again; prints one JSON object.

    python benchmarks/failover.py --kills 100 --freezes 100

Three replicas and a three-member etcd on loopback, clients that create, cancel, register, beat and
write the ledger, and agents that relay a model meanwhile. Each round ends when a write that began
after the fault was accepted; the replica is then started again (or thawed) and must follow. At the
end every acknowledged write must be there exactly once and every unknown one at most once
(``leaders/history.py``), and no answer may have come from an older leader. Bytes are watched at the
agents (``leaders/wire.py``): they need no leader to move.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.leaders.cluster import Cluster, Said, ask, cluster, make_model
from benchmarks.leaders.history import violations
from benchmarks.leaders.load import Load, final_of
from benchmarks.leaders.wire import WireWatch
from paceline.schemas import CreateDeployment, DeploymentStatus, RegisterWorker

RESULT = Path(__file__).parent / "results" / "failover.json"
ROUND_S = 60.0  # a round that takes longer is a failure of its own


def run(
    endpoints: list[str],
    *,
    kills: int,
    freezes: int,
    agents: int = 3,
    limit_mbit: float = 4.0,
    lease_s: float = 3.0,
    round_s: float = 9.0,
    pause_s: tuple[float, float] = (0.3, 1.2),
    seed: int = 0,
    state: Path,
) -> dict[str, object]:
    """Return what ``kills`` and ``freezes`` of the leader did."""
    chance = random.Random(seed)
    faults = ["kill"] * kills + ["freeze"] * freezes
    chance.shuffle(faults)
    with cluster(state, endpoints, lease_s=lease_s) as made:
        source = make_model(state / "sources" / "tiny", "v1", 64 * 1024)
        load = Load(made, source, seed=seed)
        with transferring(made, agents, limit_mbit, round_s * len(faults)) as watch:
            load.start()
            begun_s = time.monotonic()
            rounds = []
            try:
                for number, fault in enumerate(faults):
                    time.sleep(chance.uniform(*pause_s))
                    rounds.append(one_round(made, load, watch, fault) | {"number": number})
                    print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
            finally:
                load.stop()
            seconds = time.monotonic() - begun_s
        made.await_ready()
        final = final_of(made, load.history)
        invocations = load.history.all()
        found = violations(invocations, final) + load.read_failures + load.broken + watch.broken
    times = {
        fault: sorted(float(str(r["seconds"])) for r in rounds if r["fault"] == fault)
        for fault in ("kill", "freeze")
    }
    return {
        "kills": kills,
        "freezes": freezes,
        "lease_s": lease_s,
        "agents": agents,
        "seconds": round(seconds, 1),
        "to_first_accepted_write_s": {fault: figures(each) for fault, each in times.items() if each}
        | {"all": figures(sorted(itertools.chain(*times.values())))},
        "answers_of_thawed_leaders": sorted(
            {str(answer) for each in rounds for answer in each["thawed"]}  # type: ignore[attr-defined]
        ),
        "wire": {
            "longest_gaps_of_one_agent_s": [
                {"agent": name, "seconds": round(gap_s, 3), "until_s": round(at_s - begun_s, 1)}
                for gap_s, at_s, name in sorted(watch.gaps, reverse=True)[:5]
            ],
            "longest_gap_while_nobody_led_s": max(float(str(r["wire_gap_s"])) for r in rounds),
            "p99_gap_s": round(quantile(sorted(each[0] for each in watch.gaps), 0.99), 3),
            "bytes": watch.moved_bytes,
        },
        "invocations": load.history.counts(),
        "probe_writes": len(load.accepted),
        "audit_rows_of_creations": sum(final.created.values()),
        "violations": found,
        "rounds": rounds,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
    }


def one_round(made: Cluster, load: Load, watch: WireWatch, fault: str) -> dict[str, object]:
    """Break the leader, wait for the next accepted write, and mend what was broken."""
    name, epoch = made.leader()
    made.signal(name, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    broken_s = time.monotonic()
    accepted_s = first_accepted(load, broken_s)
    thawed: list[int] = []
    if fault == "kill":
        made.reap(name)
        made.start_replica(name)
    else:
        thawed = thaw(made, name)
    new, newer = made.leader()
    assert newer > epoch, f"{new} leads with epoch {newer} after {epoch}"
    made.await_ready()
    return {
        "at_s": broken_s,
        "fault": fault,
        "leader": name,
        "next": new,
        "epoch": newer,
        "seconds": round(accepted_s - broken_s, 3),
        "thawed": thawed,
        "wire_gap_s": round(watch.longest_within(broken_s, accepted_s), 3),
    }


def first_accepted(load: Load, after_s: float) -> float:
    """Return when a write that began after ``after_s`` was accepted."""
    until_s = time.monotonic() + ROUND_S
    while time.monotonic() < until_s:
        recent = [each for each in load.accepted[-200:] if each[0] >= after_s]
        if recent:
            return min(ended_s for _, ended_s in recent)
        time.sleep(0.01)
    raise AssertionError(f"no write was accepted within {ROUND_S:.0f} s; broken: {load.broken}")


def thaw(made: Cluster, name: str) -> list[int]:
    """Wake a frozen leader and return what it answered to writes and beats sent while it slept.

    They wait in its sockets, so they are the first thing that it sees.
    """
    url = made.urls[int(name[1:])]
    register = RegisterWorker(
        worker_id="witness", hostname="h", rack="r", available_storage=1, address="127.0.0.1:9"
    )
    bodies = [("/workers/register", register.model_dump_json().encode())]
    beat = {"worker_id": "beat4", "status": "idle", "incarnation": 1}
    bodies.append(("/workers/heartbeat", json.dumps(beat).encode()))
    said: list[Said | None] = []
    askers = [
        threading.Thread(
            target=lambda path=path, body=body: said.append(
                ask(url, "POST", path, token=made.token, body=body, timeout_s=20.0)
            )
        )
        for path, body in bodies
    ]
    for each in askers:
        each.start()
    time.sleep(0.1)
    made.signal(name, signal.SIGCONT)
    for each in askers:
        each.join()
    statuses = [each.status for each in said if each is not None]
    assert len(statuses) == len(bodies), f"{name} gave no answer after it was thawed"
    assert all(status in (307, 503) for status in statuses), (
        f"{name} was thawed and answered as if it led: {statuses}"
    )
    return statuses


@contextlib.contextmanager
def transferring(
    made: Cluster, count: int, limit_mbit: float, seconds: float
) -> Iterator[WireWatch]:
    """Have ``count`` agents relay one model after the other; each lasts about five minutes."""
    names = [f"node-{number}" for number in range(count)]
    for name in names:
        made.start_agent(name, limit_mbit)
    watch = WireWatch({name: process.pid for name, process in made.agents.items()})
    watch.start()
    stopping = threading.Event()
    size = int(limit_mbit / 8 * 1e6 * min(seconds + 20.0, 300.0))
    thread = threading.Thread(
        target=_deploy_on, args=(made, watch, names, size, stopping), name="transfers", daemon=True
    )
    thread.start()
    until_s = time.monotonic() + 60.0
    while not watch.gaps:
        assert time.monotonic() < until_s, "no agent receives anything"
        time.sleep(0.05)
    try:
        yield watch
    finally:
        stopping.set()
        watch.stop()
        thread.join(90)


def _deploy_on(
    made: Cluster, watch: WireWatch, names: list[str], size: int, stopping: threading.Event
) -> None:
    client = made.client(patience_s=60.0)
    for number in itertools.count():
        version = f"model-{number}"
        source = make_model(made.state / "sources" / version, version, size)
        call = CreateDeployment(
            model_id="m", version=version, source_url=source, target_workers=tuple(names)
        )
        deployment_id = client.create(call, version).deployment_id
        watch.resume()
        while not stopping.wait(0.5):
            status = client.deployment(deployment_id).status
            if status.is_final:
                watch.pause()
                if status is not DeploymentStatus.COMPLETE:
                    watch.broken.append(f"{deployment_id} is {status}")
                break
        if stopping.is_set():
            break
    client.close()


def figures(ordered: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the worst."""
    return {
        "p50": round(statistics.median(ordered), 3),
        "p99": round(quantile(ordered, 0.99), 3),
        "max": round(ordered[-1], 3),
    }


def quantile(ordered: list[float], share: float) -> float:
    """Return the value below which ``share`` of ``ordered`` lie."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--freezes", type=int, default=10)
    parser.add_argument("--agents", type=int, default=3)
    parser.add_argument("--limit-mbit", type=float, default=4.0)
    parser.add_argument("--lease-s", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT)
    chosen = parser.parse_args()
    from tests.support.etcd import etcd_cluster  # needs Debian's etcd-server

    with (
        tempfile.TemporaryDirectory() as temporary,
        etcd_cluster(Path(temporary) / "etcd") as etcd,
    ):
        report = run(
            list(etcd.access.endpoints),
            kills=chosen.kills,
            freezes=chosen.freezes,
            agents=chosen.agents,
            limit_mbit=chosen.limit_mbit,
            lease_s=chosen.lease_s,
            seed=chosen.seed,
            state=Path(temporary) / "state",
        )
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: value for key, value in report.items() if key != "rounds"}))
    return 1 if report["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
