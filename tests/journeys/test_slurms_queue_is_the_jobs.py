"""`SlurmEngine` with a real slurmctld and two slurmd: the answers of Slurm's own commands.

No training: the whole way of a job is in test_slurm_admits_each_job.py, and takes minutes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.hosts import Host, site
from tests.journeys.slurm import PARTITION, queue, start_slurm

pytestmark = [
    pytest.mark.netns,
    pytest.mark.services,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
]

# What a coordinator's scheduler does, on the login node. Its lines are what it saw.
PROGRAM = """
import json, pathlib, subprocess, sys, time
from paceline.config import Endpoints, Runtime, Secrets, load_profile, with_job_settings
from paceline.jobs import Host, Request, Reservation, SlurmEngine, gang_of
from paceline.schemas import JobState, SubmitJob, TrainingJob, digest_of

partition = sys.argv[1]
chosen = {"cluster.slurm.per_job": "true", "cluster.slurm.partition": partition}
profile = load_profile("slurm", chosen)
where = Endpoints(scheduler_address="tls://control:8786")
runtime = Runtime(
    profile=profile, state_dir=pathlib.Path.cwd(), endpoints=where, secrets=Secrets()
)
hosts = [Host(name=each, slots=2) for each in ("host-1", "host-2")]

def request(number, **more):
    given = {"model_id": "tiny", "version": "1", "data_snapshot": "s3://b/x", **more}
    spec = SubmitJob.model_validate(given)
    job = TrainingJob(
        job_id=f"tj-{number:012x}", submission_id=digest_of(given), spec=spec,
        run_id="run-20260101-000000-000000", state=JobState.QUEUED, created_at=1.0, updated_at=1.0,
    )
    settings = with_job_settings(profile, spec.settings).training
    gang = gang_of(job, settings, [])
    return Request(job=job, gang=gang, ranks_per_node=settings.ranks_per_node)

def say(**what):
    print(json.dumps(what), flush=True)

def standing(engine, waiting, wanted, running=(), seconds=240):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for each in waiting:
            engine.submit(each)
        found = engine.status(hosts, waiting, running, 0.0)
        if wanted(found, engine.reasons()):
            return found, dict(engine.reasons())
        time.sleep(1)
    sys.exit(f"this never came; {found} {engine.reasons()}")

def waits_in_queue(found, reasons):
    text = reasons.get(second.job.job_id, "")
    return "PENDING: " in text and "None" not in text

engine = SlurmEngine(runtime)
for more in ({"queue": "nope"}, {"ranks": 99}, {}):
    say(never=engine.why_never(request(9, resources=more), hosts))
first, second = request(1), request(2)
ids = first.job.job_id, second.job.job_id
found, _ = standing(engine, [first], lambda found, _: found[ids[0]].phase == "granted")
slurm_id = found[ids[0]].allocation.id
say(first=found[ids[0]].placement.hosts)
held = Reservation(gang=first.gang, hosts=found[ids[0]].placement.hosts)
found, reasons = standing(engine, [second], waits_in_queue, [held])
say(second=reasons[ids[1]], allocation=found[ids[1]].allocation.model_dump())
engine = SlurmEngine(runtime)  # of another coordinator
standing(engine, [second], waits_in_queue, [held])
say(after_failover=len(subprocess.check_output(["squeue", "-h"], text=True).splitlines()))
subprocess.run(["scontrol", "requeue", slurm_id], check=True)
found, _ = standing(
    engine, [second], lambda found, _: found[ids[0]].phase == "revoked", [held]
)
say(taken=found[ids[0]].reason)
standing(engine, [first, second], lambda found, _: found[ids[1]].phase == "granted")
say(second_granted=True, first=engine.reasons()[ids[0]])
engine.cancel(ids[1])
found, _ = standing(engine, [first], lambda found, _: found[ids[0]].phase == "granted")
say(resumed=found[ids[0]].allocation.id == slurm_id)
subprocess.run(["scancel", slurm_id], check=True)
found, _ = standing(engine, [], lambda found, _: found[ids[0]].phase == "cancelled", [held])
say(cancelled=found[ids[0]].reason)
"""


@pytest.fixture(scope="module")
def control(software: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with site(software, hosts=3) as bed:
        start_slurm(bed, tmp_path_factory.mktemp("logs"))
        yield bed.hosts[0]


def test_jobs_wait_run_move_and_end_as_slurm_says(control: Host) -> None:
    control.write("engine.py", PROGRAM)
    done = control.run("python", "engine.py", PARTITION)
    assert done.code == 0, done.out + done.err
    said: list[dict[str, Any]] = [json.loads(each) for each in done.out.splitlines()]
    unknown, large, possible = (each["never"] for each in said[:3])
    assert "invalid partition specified: nope" in unknown
    assert "More processors requested" in large or "node configuration" in large, large
    assert possible == ""
    seen = {key: value for each in said[3:] for key, value in each.items() if key != "first"}
    assert said[3]["first"] == {"host-1": 2, "host-2": 2}
    allocation = seen["allocation"]
    assert (allocation["engine"], allocation["state"]) == ("slurm", "PENDING")
    assert allocation["reason"] in ("Resources", "Priority")
    assert seen["second"] == f"Slurm job {allocation['id']} is PENDING: {allocation['reason']}"
    assert seen["after_failover"] == 2, "another coordinator submits nothing again"
    assert seen["taken"].startswith("Slurm has taken its nodes back: Slurm job ")
    assert seen["second_granted"] and seen["resumed"]
    assert seen["cancelled"].endswith("is CANCELLED")
    assert not queue(control)
