"""No secret of an installation is where people or other programs look: after a whole lifecycle."""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.cli.options import call_every
from paceline.client import CoordinatorClient
from paceline.client.installation import FINAL
from paceline.config import Runtime
from paceline.registry import Registry
from paceline.schemas import JobState
from paceline.storage import ObjectStore
from tests.support.command import paceline
from tests.support.stack import (
    Ended,
    await_registered,
    environment,
    installation,
    prefect,
    processes_of,
    state_of,
    wait_until,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("installation"),
    pytest.mark.timeout(300),
]

# Where they belong: readable by the owner alone; the last one is MLflow's own.
KEPT = ("runtime.json", "secrets.json", "mlflow/auth.ini")
SHORTEST = 12  # characters of what is looked for
PLANTED = "canary-5b1e7c09d2"
JOB = {"model_id": "m", "version": "1", "dataSnapshot": "s3://b/data/snapshots/x"}


def forms(runtime: Runtime) -> dict[str, bytes]:
    """Return each secret by its name, also as HTTP sends it."""
    made = runtime.secrets
    values = {name: getattr(made, name) for name in type(made).model_fields if name[:3] != "tls"}
    values |= {name: getattr(made, name) for name in ("agents_token", "peers_token", "records_key")}
    found = {}
    for name, value in values.items():
        for part in {value, value.partition(":")[2]} - {""}:
            if len(part) >= SHORTEST:
                found[f"{name} {len(found)}"] = part.encode()
        if ":" in value:
            found[f"{name} as a header"] = base64.b64encode(value.encode())
    return found


def test_files_and_the_process_list_have_none(stack: Runtime, lifecycle: Ended) -> None:
    assert lifecycle.code == 0
    secrets = forms(stack)
    assert len(secrets) >= 6
    leaks = []
    for path in stack.state_dir.rglob("*"):
        known = str(path.relative_to(stack.state_dir)) in KEPT
        if not path.is_file() or path.is_symlink() or known:
            continue
        content = path.read_bytes()
        leaks += [f"{name} in {path}" for name, each in secrets.items() if each in content]
    for process in psutil.process_iter():
        line = Path(f"/proc/{process.pid}/cmdline")
        content = line.read_bytes() if line.exists() else b""
        leaks += [f"{name} in {content!r}" for name, each in secrets.items() if each in content]
    assert not leaks, "\n".join(leaks)
    for each in (stack.state_dir / name for name in KEPT):
        assert each.stat().st_mode & 0o077 == 0


def test_a_secret_in_a_url_is_refused_and_kept_nowhere(stack: Runtime, tmp_path: Path) -> None:
    """Whatever the command and, over REST, whatever the field."""
    place = f"user:{PLANTED}@127.0.0.1:9"
    token = f"{PLANTED}@127.0.0.1:9"
    commands = [
        ("snapshot", f"s3://{place}/texts"),
        ("publish", str(tmp_path), f"s3://{place}/m", "--model", "m", "--version", "1"),
        ("publish", f"oci://{place}/m:1"),
        ("publish", f"oci://{token}/m:1"),
        ("distribute", f"https://{place}/m"),
        ("distribute", f"https://{token}/m"),
        ("training", "start", "m", "1", "--factory", f"git+https://{token}/r.git@{'0' * 40}#m:f"),
        ("generate", f"s3://{place}/m", "hello"),
        ("training", "start", "m", "1", f"--snapshot=s3://{place}/x"),
        ("jobs", "submit", "m", "1", "--snapshot", f"s3://{place}/x"),
        ("lifecycle", "--data", f"s3://{place}/texts"),
    ]
    for words in commands:
        done = paceline(*words, "--state", stack.state_dir)
        assert done.returncode == 2, words
        assert "a URL has a password" in done.stderr
        assert PLANTED not in done.stdout + done.stderr, words
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/deployments", {"model_id": "m", "version": "1", "source_url": f"s3://{place}/m"}),
        *(
            ("/v1/training-jobs", JOB | {field: f"git+https://{where}/r"})
            for field in ("dataSnapshot", "codeRef", "evaluateOn")
            for where in (place, token)
        ),
    ]
    for path, body in bodies:
        request = urllib.request.Request(
            f"{stack.endpoints.coordinator_url}{path}",
            data=json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {stack.secrets.coordinator_token}",
                "Content-Type": "application/json",
            },
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=30)
        with caught.value as answer:
            said = answer.read().decode()
        assert caught.value.code == 422
        assert "a URL with a password or token is refused" in said, said
        assert PLANTED not in said
    for each in stack.state_dir.rglob("*"):
        if each.is_file():
            assert PLANTED.encode() not in each.read_bytes(), each


# What a whole job is given, each in another way: by a file that a variable names (the bucket's own
# key, which every request to S3 carries), by the environment, and by a block of Prefect's.
BY_FILE, BY_ENVIRONMENT, BY_BLOCK = (
    f"canary-by-{each}-92c4f17d" for each in ("file", "env", "block")
)
KEY = base64.b64encode(f"{BY_FILE:x<32}".encode()).decode()
CANARIES = {each: each.encode() for each in (BY_FILE, BY_ENVIRONMENT, BY_BLOCK, KEY)}
SAVE = (
    "import sys; from prefect.blocks.system import Secret; Secret(value=sys.stdin.read()).save('c')"
)


def found_in(content: bytes, where: str) -> list[str]:
    return [f"{name} in {where}" for name, each in CANARIES.items() if each in content]


def in_process_lists() -> list[str]:
    """Return the canaries that are in the command line of some process."""
    leaks: list[str] = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            leaks += found_in(each.read_bytes(), f"the command line {each}")
    return leaks


def in_prefect(stack: Runtime) -> Iterator[tuple[str, bytes]]:
    """Yield everything that Prefect's API shows."""
    for kind in ("flow_runs", "task_runs", "deployments", "logs", "artifacts", "work_pools",
                 "block_documents", "variables", "events", "flow_run_states"):  # fmt: skip
        offset, limit = 0, 100
        while True:
            if kind == "flow_run_states":
                runs = prefect(stack, "POST", "/flow_runs/filter", {})
                page = [
                    prefect(stack, "GET", f"/flow_run_states/?flow_run_id={each['id']}")
                    for each in runs
                ]
            elif kind == "events":
                page = prefect(stack, "POST", "/events/filter", {"limit": 50, "filter": {}})[
                    "events"
                ]
            else:
                asked = {"limit": limit, "offset": offset}
                page = prefect(stack, "POST", f"/{kind}/filter", asked)
            yield f"Prefect's {kind}", json.dumps(page).encode()
            offset += limit
            if kind in ("flow_run_states", "events") or len(page) < limit:
                break


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # with an installation of its own, on a busy machine
def test_a_whole_job_leaves_none_of_the_secrets_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one that succeeds, that is cancelled or that fails."""
    kept, leaks, texts = tmp_path / "key", list[str](), list[str]()
    kept.write_text(KEY)
    monkeypatch.setenv("S3_CUSTOMER_KEY_FILE", str(kept))
    monkeypatch.setenv("HF_TOKEN", BY_ENVIRONMENT)
    settings = ("objects.customer_key_env=S3_CUSTOMER_KEY", "cluster.nodes=2",
                "control.flow_starter=prefect")  # fmt: skip
    with (
        installation(tmp_path / "state", *settings) as stack,
        call_every(0.2, lambda: leaks.extend(in_process_lists())),
    ):
        await_registered(stack)
        subprocess.run(
            [sys.executable, "-c", SAVE], input=BY_BLOCK, text=True, check=True, timeout=120,
            env=environment() | stack.prefect_environment(),
        )  # fmt: skip
        flow = prefect(stack, "GET", "/deployments/name/train-model/train-model")
        block = {"env": {"PACELINE_SWEEPS_PASSWORD": "{{ prefect.blocks.secret.c }}"}}
        prefect(stack, "PATCH", f"/deployments/{flow['id']}", {"job_variables": block})
        inputs = prefect(stack, "GET", "/deployments/name/prepare-inputs/prepare-inputs")["id"]
        made = prefect(stack, "POST", f"/deployments/{inputs}/create_flow_run", {})["id"]
        wait_until(lambda: state_of(stack, made) in FINAL, 400, "the inputs are made")
        store = ObjectStore.from_runtime(stack)
        (snapshot,) = store.directories(f"{stack.data_url}/snapshots")
        (model,) = store.directories(stack.models_url)

        def run(*words: str, code: int = 0) -> str:
            done = paceline(*words, "--state", str(stack.state_dir))
            texts.append(done.stdout + done.stderr)
            assert done.returncode == code, done
            return done.stdout

        data = ("--snapshot", f"{stack.data_url}/snapshots/{snapshot}", "--ranks", "2")
        client = CoordinatorClient.of(stack)

        def submit(steps: int) -> str:
            out = run(
                "jobs", "submit", model, "1", *data, "--steps", str(steps), "--evaluate", "--json"
            )
            return str(json.loads(out)["job"]["job_id"])

        def becomes(job_id: str, state: JobState) -> None:
            wait_until(lambda: client.job(job_id).job.state is state, 400, f"{job_id} is {state}")

        done, cancelled = submit(20), submit(100_000)
        becomes(done, JobState.SUCCEEDED)
        becomes(cancelled, JobState.RUNNING)
        seen = b"".join(
            Path(f"/proc/{each.pid}/environ").read_bytes() for each in processes_of(stack.state_dir)
        )
        given = (BY_BLOCK, BY_ENVIRONMENT, str(kept))
        assert all(each.encode() in seen for each in given), "its processes have them"
        run("jobs", "cancel", cancelled)
        becomes(cancelled, JobState.CANCELLED)
        lost = {"model_id": model, "version": "1", "continue_from": "job-0123456789ab",
                "snapshot_url": data[1]}  # fmt: skip
        failed = prefect(
            stack, "POST", f"/deployments/{flow['id']}/create_flow_run", {"parameters": lost}
        )["id"]
        wait_until(lambda: state_of(stack, failed) in FINAL, 200, "the flow has failed")
        assert state_of(stack, failed) == "FAILED"
        for job_id in (done, cancelled):
            for what in ("show", "logs"):
                run("jobs", what, job_id)
        run("audit")
        for where, content in in_prefect(stack):
            leaks += found_in(content, where)
        registry = Registry.from_runtime(stack)
        for job_id in (done, cancelled):
            mlflow = registry.call("get_run", registry.find_run(client.job(job_id).job.run_id))
            leaks += found_in(json.dumps(mlflow.to_dictionary()).encode(), "MLflow's run")
    leaks += found_in("".join(texts).encode(), "what commands print")
    for path in (tmp_path / "state").rglob("*"):  # every log, table and artifact
        if path.is_file() and not path.is_symlink():
            leaks += found_in(path.read_bytes(), str(path))
    assert not leaks, "\n".join(dict.fromkeys(leaks))
