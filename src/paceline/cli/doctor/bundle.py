"""The support bundle of `paceline doctor`: findings, settings and the ends of logs, no secrets.

Every text passes one ``Redactor``: it removes the values of this installation's secrets wherever
they stand, and what looks like a secret of others (private keys, bearer tokens, URL passwords).
"""

from __future__ import annotations

import base64
import configparser
import importlib.metadata
import io
import json
import os
import platform
import re
import tarfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import quote

from paceline.cluster import SECRETS_FILE
from paceline.config import Runtime, scrub_variables
from paceline.schemas import Diagnosis
from paceline.system import write_private
from paceline.text import without_passwords

REMOVED = "[removed]"
LOG_BYTES = 256 * 1024  # of each log, its end
MOST_FILES = 2000  # that the listing of the state directory names
SHORTEST = 6  # characters of a value that is looked for: shorter ones occur everywhere
_LOOKS_SECRET = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\bpl_[0-9a-f]{16}_[\w-]+"
    r"|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
    r"|(?i:(?<=bearer )|(?<=basic ))[\w.~+/=-]{8,}"
    r"|(?<=X-Amz-Signature=)[0-9a-f]+|(?<=X-Amz-Security-Token=)[^&\s\"]+",
    re.DOTALL,
)


class Redactor:
    """Removes known secrets, and what looks like one, from texts."""

    def __init__(self, secrets: Iterable[str]) -> None:
        forms = set()
        for each in secrets:
            encoded = base64.b64encode(each.encode()).decode()
            forms |= {each, quote(each, safe=""), json.dumps(each)[1:-1], encoded}
        longest_first = sorted((e for e in forms if len(e) >= SHORTEST), key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def __call__(self, text: str) -> str:
        """Return ``text`` without secrets."""
        known = self._known.sub(REMOVED, text)
        return without_passwords(_LOOKS_SECRET.sub(REMOVED, known))


def secrets_of(runtime: Runtime | None) -> Iterator[str]:
    """Yield every secret value that this process could write by accident."""
    before = dict(os.environ)
    yield from (before[name] for name in scrub_variables(dict(before), secrets_only=True))
    yield from _aws_keys()
    if runtime is None:
        return
    secrets = runtime.secrets
    derived = (secrets.agents_token, secrets.peers_token, secrets.records_key)
    values = [*secrets.model_dump(exclude={"tls_ca", "tls_cert", "tls_key"}).values(), *derived]
    try:
        kept = json.loads((runtime.state_dir / SECRETS_FILE).read_bytes())
    except (OSError, ValueError):
        kept = {}
    values += [x for x in kept.values() if isinstance(x, str) and not x.startswith("/")]  # no path
    for each in values:
        yield each
        if ":" in each:  # "user:password"
            yield each.partition(":")[2]


def _aws_keys() -> Iterator[str]:
    named = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials"
    parser = configparser.RawConfigParser()
    try:
        parser.read(Path(named).expanduser())
    except (configparser.Error, OSError, UnicodeDecodeError):
        return
    for section in parser.sections():
        yield from (value for _, value in parser.items(section))


def write_bundle(path: Path, diagnosis: Diagnosis, runtime: Runtime | None) -> None:
    """Write the bundle (tar.gz, mode 0600): findings, versions, settings, logs, names of files."""
    clean = Redactor(secrets_of(runtime))
    texts = {"findings.json": diagnosis.model_dump_json(indent=1), "machine.txt": _machine()}
    if runtime is not None:
        shown = runtime.model_dump(mode="json", exclude={"secrets"})
        texts["settings.json"] = json.dumps(shown, indent=1)
    if runtime is not None and not runtime.is_login:
        texts |= dict(_logs(runtime.state_dir))
        texts["files.txt"] = "\n".join(_listing(runtime.state_dir))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as bundle:
        for name, text in texts.items():
            content = clean(text).encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"paceline-support/{name}")
            entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
            bundle.addfile(entry, io.BytesIO(content))
    write_private(path.absolute(), buffer.getvalue())


def _machine() -> str:
    packages = sorted(
        f"{each.metadata['Name']} {each.version}" for each in importlib.metadata.distributions()
    )
    lines = [platform.platform(), f"Python {platform.python_version()}", f"CPUs {os.cpu_count()}"]
    return "\n".join([*lines, "", *packages])


def _logs(state_dir: Path) -> Iterator[tuple[str, str]]:
    found = {
        each
        for pattern in ("*.log", "logs/*", "nodes/*/*.log")
        for each in state_dir.glob(pattern)
        if each.is_file() and not each.is_symlink()
    }
    for path in sorted(found):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            text = file.read(LOG_BYTES).decode("utf-8", "replace")
        yield f"logs/{path.relative_to(state_dir)}", text


def _listing(state_dir: Path) -> Iterator[str]:
    for number, path in enumerate(sorted(state_dir.rglob("*"))):
        if number == MOST_FILES:
            yield "…"
            return
        found = path.lstat()
        yield f"{found.st_mode & 0o7777:04o} {found.st_size:>14} {path.relative_to(state_dir)}"
