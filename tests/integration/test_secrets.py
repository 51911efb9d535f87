"""No secret of an installation is where people or other programs look: after a whole lifecycle."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.config import Runtime
from tests.support.command import paceline
from tests.support.stack import Ended

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
        ("train", "m", "1", "--factory", f"git+https://{token}/r.git@{'0' * 40}#m:f"),
        ("generate", f"s3://{place}/m", "hello"),
        ("train", "m", "1", f"--snapshot=s3://{place}/x"),
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
