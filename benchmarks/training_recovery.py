"""What failures of ranks cost: kill to first new step, frozen rank to notice, goodput, exactness.

A small model on two ranks of this machine, through the same driver, launcher and checkpoints as
everywhere. ``kills``: a rank gets SIGKILL; seconds from the signal to the first step that is new
(its number was never reached before), and to the first step of the new attempt. ``freezes``:
SIGSTOP; seconds until it is noticed, against the step deadline. ``goodput``: one kill every twenty
intervals; productive share of the time from the first step's start to the last one's end, against
1 - (I/2 + R)/MTBF - stall: I the interval between saves, R from the signal to where the first step
after it begins to compute (its wait for data included), MTBF that time a failure. Steps made again,
waits for data and a last save that came too late are losses, whatever the formula says of them. Its
model is larger: a step of 10 ms pays 0.8 % for its data alone, which is no recovery's doing.
``exact``: losses and weights of a run that was killed, against one that was not. ``--ray`` adds Ray
Train's recovery from the same kill on the same model, in the environment of ``make peers``.

    python benchmarks/training_recovery.py [--kills 10] [--freezes 3] [--parameters 100000]
                                           [--goodput-kills 5] [--ray] [--quick]
    python benchmarks/training_recovery.py --ranks 1 --freezes 0 --goodput-kills 0   # on one GPU
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from paceline.config import (
    CheckpointSettings,
    DataSettings,
    GuardSettings,
    ModelSettings,
    Profile,
    TrainingSettings,
)
from paceline.schemas import RankEvent, TrainJob, TrainResult
from paceline.training import LocalLauncher, run_job, single

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "training_recovery.json"
PEERS = ROOT / ".venv-peers" / "bin" / "python"
GOAL_RECOVERY_S = 2.0
GOAL_GOODPUT = 0.95
STEP_DEADLINE_S = 5.0


class Bench:
    """A base model and a snapshot on disk, and launchers that stay warm."""

    def __init__(self, directory: Path, parameters: int, ranks: int) -> None:
        self._directory, self.ranks = directory, ranks
        self.parameters = parameters
        texts = directory / "texts"
        texts.mkdir()
        for number in range(40):
            body = "".join(f"line {n} of file {number} is {n * number}\n" for n in range(60))
            (texts / f"{number}.txt").write_text(body)
        self._texts = texts
        self.launcher = LocalLauncher()

    def job(self, name: str, steps: int, every_steps: int, **guard: Any) -> TrainJob:
        """Return a job of its own."""
        profile = Profile(
            model=ModelSettings(parameters=self.parameters, context=64),
            data=DataSettings(shard_bytes=16_384, held_out_share=0.2),
            training=TrainingSettings(
                ranks=self.ranks,
                steps=steps,
                batch_sequences=8,
                checkpoints=CheckpointSettings(every_steps=every_steps, keep=2),
                guard=GuardSettings(
                    max_restarts=1000,
                    failures_per_host=1000,
                    step_deadline_s=STEP_DEADLINE_S,
                    spike_factor=1e9,
                    **guard,
                ),
            ),
        )
        asked = single.TrainingRequest(
            output=self._directory / "out", profile=profile, source=str(self._texts)
        )
        return single.prepare(asked).model_copy(update={"job_id": name})

    def run(
        self, job: TrainJob, on_event: Callable[[RankEvent, float], None]
    ) -> tuple[TrainResult, dict[int, float]]:
        """Run ``job``; return its result and its losses by step."""
        losses: dict[int, float] = {}

        def heard(event: RankEvent) -> None:
            if event.rank == 0 and event.event == "step":
                losses[event.step] = float(str(event.data["loss"]))
            on_event(event, time.monotonic())

        return run_job(job, [single.WORKER], self.launcher, on_event=heard), losses


class Striker:
    """Strikes the last rank whenever ``every`` new steps were made; notes what followed."""

    def __init__(
        self, bench: Bench, number: signal.Signals, every: int, strikes: int, spread: int = 1
    ) -> None:
        # Failures fall anywhere in an interval: with ``spread`` its steps, up to so many later.
        self._random, self._spread = Random(0), spread
        self._later = self._random.randrange(spread)
        self._bench, self._number = bench, number
        self._every, self._left = every, strikes
        draws = Random(0)
        self.steps = sum(every + draws.randrange(spread) for _ in range(strikes))  # to the last one
        self._reached = 0
        self._last_strike = 0
        self._struck_at: float | None = None
        self._struck_in = 0
        self.new_step_s: list[float] = []  # to a step whose number is new
        self.any_step_s: list[float] = []  # to the first step of the new attempt
        self.recovery_s: list[float] = []  # to where that step begins to compute
        self._resumed = False
        self.times: list[float] = []
        self._saved = 0

    def __call__(self, event: RankEvent, now: float) -> None:
        """Take in one event."""
        if event.event == "checkpoint" and not event.data.get("rejected"):
            self._saved = max(self._saved, event.step)
        if event.event != "step" or event.rank != 0:
            return
        if self._struck_at is not None:
            if event.attempt > self._struck_in and not self._resumed:
                self.any_step_s.append(now - self._struck_at)
                took = float(str(event.data["step_seconds"]))
                waited = float(str(event.data["waited_s"]))  # for its data: that is recovery, too
                self.recovery_s.append(now - self._struck_at - max(0.0, took - waited))
                self._resumed = True
            if event.attempt > self._struck_in and event.step > self._reached:
                self.new_step_s.append(now - self._struck_at)
                self._struck_at = None
        self._reached = max(self._reached, event.step)
        due = event.step - self._last_strike >= self._every + self._later and self._saved
        if self._struck_at is None and self._left and due:
            self._left -= 1
            self._last_strike, self._later = event.step, self._random.randrange(self._spread)
            self._struck_in, self._resumed = event.attempt, False
            os.kill(self._bench.launcher.pids[self._bench.ranks - 1], self._number)
            self._struck_at = time.monotonic()
            self.times.append(self._struck_at)


def kills(bench: Bench, count: int) -> dict[str, Any]:
    """Seconds from SIGKILL of a rank to steps again."""
    every = 12
    striker = Striker(bench, signal.SIGKILL, every, count)
    job = bench.job(f"kills-{count}", (count + 2) * every, 4)
    result, losses = bench.run(job, striker)
    calm, whole = bench.run(bench.job(f"calm-{count}", (count + 2) * every, 4), lambda *_: None)
    return {
        "kills": len(striker.new_step_s),
        "to_new_step_s": _spread(striker.new_step_s),
        "to_first_step_s": _spread(striker.any_step_s),
        "lost_steps": [each.lost_steps for each in result.restarts],
        "losses_identical": losses == whole,
        "weights_identical": result.weights_digest == calm.weights_digest,
        "accounts_sum_to_wall": _sums(result),
    }


def freezes(bench: Bench, count: int) -> dict[str, Any]:
    """Seconds from SIGSTOP of a rank to the gang's end, and whether that rank is the one named."""
    every = 100  # long enough to be told of, and struck, before the job is done
    striker = Striker(bench, signal.SIGSTOP, every, count)
    result, _ = bench.run(bench.job(f"freezes-{count}", (count + 2) * every, 10), striker)
    hung = [each for each in result.restarts if each.kind == "hung"]
    found = [
        to_step - restart.seconds
        for to_step, restart in zip(striker.any_step_s, result.restarts, strict=False)
    ]
    return {
        "freezes": len(hung),
        "deadline_s": STEP_DEADLINE_S,
        "noticed_s": _spread(found),
        "named": all(each.failed_rank == bench.ranks - 1 for each in hung),
    }


def goodput(bench: Bench, failures: int) -> dict[str, Any]:
    """Productive share at one failure every twenty intervals, against what theory allows."""
    probe: list[float] = []

    def time_steps(event: RankEvent, now: float) -> None:
        if event.event == "step" and event.rank == 0:
            probe.append(now)

    bench.run(bench.job("probe", 60, 30), time_steps)
    step_s = (probe[-1] - probe[10]) / (len(probe) - 11)  # events come in bursts: no median
    recovery_s = 1.0
    # An interval long against a recovery, as in any job worth it: I = R, so MTBF = 20 R.
    interval = max(4, round(recovery_s / step_s))
    every = round(19.5 * interval)  # and half an interval more in the mean: twenty
    striker = Striker(bench, signal.SIGKILL, every, failures, interval)
    steps = striker.steps + interval  # no quiet end, that would make failures look rarer
    job = bench.job("goodput", steps, interval)
    result, _ = bench.run(job, striker)
    ledger = result.ledger
    assert ledger is not None
    trained = ledger.wall_s - ledger.start_s - ledger.finish_s
    mtbf_s = trained / max(1, len(result.restarts))
    interval_s = interval * (ledger.productive_s + ledger.data_wait_s) / steps  # as it was then
    measured_r = statistics.mean(striker.recovery_s) if striker.recovery_s else 0.0
    stall = ledger.checkpoint_stall_s / trained
    bound = 1 - (interval_s / 2 + measured_r) / mtbf_s - stall
    return {
        "failures": len(result.restarts),
        "parameters": bench.parameters,
        "step_s": step_s,
        "interval_steps": interval,
        "interval_s": interval_s,
        "mtbf_s": mtbf_s,
        "recovery_s": measured_r,
        "stall_share": stall,
        "data_wait_share": ledger.data_wait_s / trained,
        "intervals_a_failure": steps / interval / max(1, len(result.restarts)),
        "goodput": ledger.goodput,
        "bound": bound,
        "ledger": ledger.model_dump(),
        "accounts_sum_to_wall": _sums(result),
    }


def ray_train(kills_wanted: int) -> dict[str, Any]:
    """Ray Train's seconds from the same kill to a new step, in its own environment."""
    if not PEERS.exists():
        return {"not_run": "no .venv-peers: `make peers` installs it"}
    script = Path(__file__).parent / "peers" / "ray_recovery.py"
    done = subprocess.run(
        [str(PEERS), str(script), str(kills_wanted)],
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
    )
    if done.returncode:
        return {"not_run": done.stderr.strip().splitlines()[-1:]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {"version": found["version"], "to_new_step_s": _spread(found["to_new_step_s"])}


def _sums(result: TrainResult) -> bool:
    assert result.ledger is not None
    accounts = result.ledger.model_dump()
    wall = accounts.pop("wall_s")
    accounts.pop("goodput")
    return abs(sum(accounts.values()) - wall) < 1e-6 * max(1.0, wall)


def _spread(values: list[float]) -> dict[str, Any]:
    if not values:
        return {"n": 0}
    return {
        "n": len(values),
        "median": round(statistics.median(values), 3),
        "worst": round(max(values), 3),
        "all": [round(each, 3) for each in values],
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run what is asked for, print it as one line of JSON and keep it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--freezes", type=int, default=3)
    parser.add_argument("--goodput-kills", type=int, default=5)
    parser.add_argument("--parameters", type=int, default=100_000)
    parser.add_argument("--goodput-parameters", type=int, default=1_000_000)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--quick", action="store_true", help="One kill, nothing kept.")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="recovery-") as directory:
        parameters = 20_000 if asked.quick else asked.parameters
        bench = Bench(Path(directory), parameters, asked.ranks)
        with bench.launcher:
            result: dict[str, Any] = {"benchmark": "training_recovery", "quick": asked.quick}
            result["kills"] = kills(bench, 1 if asked.quick else asked.kills)
            if asked.freezes and not asked.quick:
                result["freezes"] = freezes(bench, asked.freezes)
        if asked.goodput_kills and not asked.quick:
            larger = Path(directory) / "larger"
            larger.mkdir()
            bench = Bench(larger, asked.goodput_parameters, asked.ranks)
            with bench.launcher:
                result["goodput"] = goodput(bench, asked.goodput_kills)
    if asked.ray:
        result["ray"] = ray_train(asked.kills)
    if asked.freezes and asked.goodput_kills and not asked.quick:
        result["goals"] = {
            "recovery": result["kills"]["to_new_step_s"]["median"] <= GOAL_RECOVERY_S,
            "exact": result["kills"]["losses_identical"] and result["kills"]["weights_identical"],
            "frozen": result["freezes"]["noticed_s"]["worst"] <= STEP_DEADLINE_S,
            "goodput": result["goodput"]["goodput"] >= result["goodput"]["bound"] - 0.005,
            "goodput_95": result["goodput"]["goodput"] >= GOAL_GOODPUT,
        }
    print(json.dumps(result), flush=True)
    if not asked.quick:
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
