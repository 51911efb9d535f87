"""How near to the link's own time a model reaches every host, beside other tools (root only).

    python benchmarks/link_bound.py --hosts 8 16 32 --rate 50 50 25 --seconds 60 60 120
    python benchmarks/link_bound.py --quick                        # a minute: does it still run?
    python benchmarks/link_bound.py --hosts 8 --rows auto chain libtorrent --seconds 60
    python benchmarks/link_bound.py --sweep libtorrent             # how the peers were tuned
    python benchmarks/link_bound.py --plot benchmarks/results/link_bound.json
    python benchmarks/link_bound.py --replay benchmarks/results/link_bound.json  # simulator's error

Hosts are network namespaces (``benchmarks/testbed``) with ``--rate`` Mbit/s in each direction; the
origin is an S3 server as fast as one host. The bound is size / goodput, goodput = rate × 1448 /
1514. Paceline's clock runs from the accepted plan, with all agents registered, to the last rename
of a verified version; a peer's from "go" to its last host. Everybody's copies are then verified by
SHA-256. Rows are interleaved; each run has a fresh testbed. Results are written after every run.

Many hosts need slower links, or the machine's cores are the bound instead (``busy`` says so): what
a piece costs is the same at any rate. And longer runs, because pieces are at least 64 KiB.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.peers import aria2, s3, torrent  # noqa: E402
from benchmarks.race import report  # noqa: E402
from benchmarks.race.case import Case, Model, make_model  # noqa: E402
from benchmarks.race.rows import OVERSUBSCRIPTION, ROWS, Row  # noqa: E402
from benchmarks.testbed import shaping, start, why_not  # noqa: E402
from paceline.errors import PacelineError  # noqa: E402

RESULTS = ROOT / "benchmarks/results/link_bound.json"
MEMORY_SHARE = 0.7  # of what is free: more goes to the disk
SWEEPS = {"libtorrent": torrent.SWEEP, "aria2": aria2.SWEEP, "boto3-s3": s3.SWEEP}
SWEEPS["aria2-s3"] = aria2.SWEEP_S3


def options() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[8])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    each = "one, or one for each of --hosts"
    parser.add_argument(
        "--rate", type=float, nargs="+", default=[50.0], help=f"Mbit/s each way; {each}"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        nargs="+",
        default=[60.0],
        help=f"the bound, size / goodput; {each}",
    )
    parser.add_argument("--naive-seconds", type=float, default=15.0, help="of N-fold rows")
    parser.add_argument("--naive-hosts", type=int, default=8, help="N-fold rows only up to these")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--piece-kib", type=int, default=0, help="0: as publishing chooses")
    parser.add_argument("--congestion", default="cubic")
    parser.add_argument(
        "--burst-segments",
        type=int,
        default=shaping.BURST_SEGMENTS,
        help="that a sender hands down at once; 2: as the kernel chooses on slow links",
    )
    parser.add_argument("--link-mbit", type=float, help="what agents are told; default: goodput")
    parser.add_argument("--agent-option", action="append", default=[], help="for every agent")
    parser.add_argument("--mtls", action="store_true", help="between workers; default: plain")
    parser.add_argument("--budget-s", type=float, help="begin no run that would end later")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="3 hosts, 3 s, two rows, once")
    parser.add_argument("--sweep", choices=list(SWEEPS), help="try a peer's settings instead")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="draw a result, run nothing")
    parser.add_argument("--replay", type=Path, metavar="JSON", help="simulate a result's runs")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.hosts, chosen.seconds, chosen.naive_seconds, chosen.repeat = [3], [3.0], 1.0, 1
        chosen.rate = chosen.rate[:1]
        if chosen.rows == list(ROWS):
            chosen.rows = ["auto", "libtorrent"]
    for name in ("rate", "seconds"):
        given = getattr(chosen, name)
        if len(given) not in (1, len(chosen.hosts)):
            parser.error(f"--{name} wants one number, or one for each of --hosts")
        by_hosts = given * len(chosen.hosts) if len(given) == 1 else given
        setattr(chosen, name, dict(zip(chosen.hosts, by_hosts, strict=True)))
    return chosen


def main() -> int:
    """Run the race; return the exit status."""
    chosen = options()
    if chosen.plot:
        target = chosen.plot.with_suffix(".png")
        report.plot(json.loads(chosen.plot.read_text()), target)
        print(target)
        return 0
    if chosen.replay:
        from benchmarks.race.replay import replay_all  # the simulator is not needed for a race

        print(json.dumps(replay_all(json.loads(chosen.replay.read_text())["runs"]), indent=1))
        return 0
    if reason := why_not():
        print(f"link_bound: {reason}", file=sys.stderr)
        return 2
    return Race(chosen).run()


class Race:
    """All runs of one command."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.began_s = time.monotonic()
        self.models: dict[tuple[int, float], Model] = {}
        self.result: dict[str, Any] = {
            "command": " ".join(["python", "benchmarks/link_bound.py", *sys.argv[1:]]),
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "cpus": os.cpu_count(),
            "kernel": platform.release(),
            "goodput": "rate x 1448 / 1514",
            "congestion": chosen.congestion,
            "burst_segments": chosen.burst_segments,
            "queue_s": shaping.QUEUE_S,
            "burst_s": shaping.BURST_S,
            "runs": [],
        }

    def run(self) -> int:
        """Run everything in turn; return 1 if any run failed."""
        try:
            for repeat, hosts, row, tuned in self.schedule():
                if self.too_late(row, hosts):
                    print("the time budget is spent", flush=True)
                    break
                self.result["runs"].append(self.one(repeat, hosts, row, tuned))
                self.save()
        except KeyboardInterrupt:
            print("interrupted: what was measured is kept", flush=True)
        finally:
            for model in self.models.values():
                model.remove()
        print(report.table(self.result["runs"]))
        took_s = time.monotonic() - self.began_s
        print(f"{len(self.result['runs'])} runs in {took_s:.0f} s → {self.chosen.out}")
        return int(any("error" in run for run in self.result["runs"]))

    def schedule(self) -> list[tuple[int, int, Row, dict[str, Any]]]:
        """Return the runs in order: every row once, in a new order each time, then again."""
        chosen, planned = self.chosen, []
        for repeat in range(chosen.repeat):
            turn = [
                (repeat, hosts, ROWS[name], tuned)
                for hosts in chosen.hosts
                for name in ([chosen.sweep] if chosen.sweep else chosen.rows)
                for tuned in (SWEEPS[name] if chosen.sweep else ({},))
                if hosts <= chosen.naive_hosts or not ROWS[name].everyone_from_origin
            ]
            Random(f"order/{chosen.seed}/{repeat}").shuffle(turn)
            planned += turn
        return planned

    def too_late(self, row: Row, hosts: int) -> bool:
        """Return whether a run would end beyond the budget."""
        if self.chosen.budget_s is None:
            return False
        needs_s = row.expected_s(hosts, self.bound_s(row, hosts))
        return time.monotonic() - self.began_s + needs_s > float(self.chosen.budget_s)

    def bound_s(self, row: Row, hosts: int) -> float:
        """Return how long the row's model takes on one link."""
        naive = row.everyone_from_origin
        return float(self.chosen.naive_seconds if naive else self.chosen.seconds[hosts])

    def model(self, bound_s: float, rate_mbit: float) -> Model:
        """Return the model that takes ``bound_s`` on one link, made once."""
        goodput = rate_mbit * shaping.GOODPUT
        size = int(goodput * 1e6 / 8 * bound_s)
        if (size, rate_mbit) not in self.models:
            made = make_model(size, goodput, piece_kib=self.chosen.piece_kib)
            self.models[size, rate_mbit] = made
        return self.models[size, rate_mbit]

    def one(self, repeat: int, hosts: int, row: Row, tuned: dict[str, Any]) -> dict[str, Any]:
        """Return one run's record; a failure is one too."""
        chosen, bound_s, rate_mbit = self.chosen, self.bound_s(row, hosts), self.chosen.rate[hosts]
        seed = chosen.seed * 1000 + repeat
        model = self.model(bound_s, rate_mbit)
        racks = row.racks(hosts)
        record: dict[str, Any] = {
            "row": row.name,
            "hosts": hosts,
            "repeat": repeat,
            "seed": seed,
            "goal": row.goal,
            "racks": racks,
            "oversubscription": OVERSUBSCRIPTION if racks > 1 else 1.0,
            "size": model.size,
            "bound_s": bound_s,
            "rate_mbit": rate_mbit,
        }
        settings = {**row.settings, "seed": seed, **tuned}
        if tuned:
            record["row"] += f" {json.dumps(tuned)}"
        if "topology" in settings:
            settings |= {
                "link_mbit": chosen.link_mbit,
                "agent_options": chosen.agent_option,
                "mtls": chosen.mtls or settings.get("mtls", False),
            }
        started_s = time.monotonic()
        try:
            with start(
                hosts=hosts,
                rate_mbit=rate_mbit,
                racks=racks,
                oversubscription=record["oversubscription"],
                congestion=chosen.congestion,
                burst_segments=chosen.burst_segments,
            ) as bed:
                outcome = row.run(
                    Case(
                        bed=bed,
                        model=model,
                        scratch=bed.scratch(memory=fits_memory(hosts, model.size)),
                        faults=row.faults(hosts, rate_mbit, bound_s, seed),
                        timeout_s=60.0 + 2.0 * row.expected_s(hosts, bound_s),
                        settings=settings,
                    )
                )
        except PacelineError as error:
            record["error"] = error.one_line()
            print(
                f"{_clock()} {hosts:3} {record['row']:<16} FAILED: {error.one_line()}", flush=True
            )
            return record
        record |= {
            "seconds": round(outcome.seconds, 3),
            "ratio": round(outcome.seconds / bound_s, 4),
            "startup_s": round(outcome.startup_s, 2),
            "usage": outcome.usage.as_json(),
            "faults": outcome.faults,
            "origin_bytes": outcome.origin_bytes,
            "cross_rack_bytes": outcome.cross_rack_bytes,
            "verified": "sha256",
            "finished_s": outcome.finished_s,
            **outcome.details,
        }
        said = f"{record['ratio']:.4f} × bound"
        if "predicted_s" in record:
            said += (
                f", {record['seconds'] / record['predicted_s']:.4f} × plan ({record['topology']})"
            )
        print(
            f"{_clock()} {hosts:3} {record['row']:<16} {outcome.seconds:7.2f} s = {said}, "
            f"CPU {outcome.usage.nodes_cpu_s:.1f} s, busy {outcome.usage.cpu_busy:.2f}, "
            f"load {outcome.usage.load_before:.1f}, "
            f"{time.monotonic() - started_s:.0f} s in all",
            flush=True,
        )
        return record

    def save(self) -> None:
        """Write what there is."""
        out = self.chosen.out
        out.parent.mkdir(parents=True, exist_ok=True)
        self.result["summary"] = report.summary(self.result["runs"])
        temporary = out.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.result, indent=1) + "\n")
        temporary.replace(out)


def fits_memory(hosts: int, size: int) -> bool:
    """Return whether ``hosts`` copies fit in memory, beside everything else."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return hosts * (size + 100_000_000) < int(line.split()[1]) * 1024 * MEMORY_SHARE
    return False


def _clock() -> str:
    return time.strftime("%H:%M:%S", time.gmtime())


if __name__ == "__main__":
    sys.exit(main())
