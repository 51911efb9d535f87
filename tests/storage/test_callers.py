"""No caller opens a store with keys of its own: each takes what the profile and boto3's chain say.

The lifecycle on another's S3 server is in tests/integration/test_sources.py.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEYS = {"config/runtime.py", "cluster/embedded.py", "cluster/supervisor.py"}  # the embedded server


def test_only_the_embedded_server_and_the_runtime_know_its_keys() -> None:
    source = ROOT / "src/paceline"
    opened = 0
    for path in (
        *source.rglob("*.py"),
        *(ROOT / "flows").glob("*.py"),
        *(ROOT / "tasks").glob("*.py"),
    ):
        text, name = path.read_text(), str(path.relative_to(ROOT)).removeprefix("src/paceline/")
        if name.startswith("storage/"):
            continue
        assert "s3_access_key" not in text or name in KEYS, name
        for given in re.findall(r"\bObjectStore(?:\.from_runtime)?\(([^)]*)", text):
            opened += 1
            # (The last: an endpoint without keys, that of another's MLflow server.)
            allowed = (
                r"object_access\(|self\.\w*runtime|runtime|load_runtime\("
                r"|ObjectAccess\(endpoint_url=environment"
            )
            assert re.match(allowed, given.strip()), name
    assert opened >= 6
