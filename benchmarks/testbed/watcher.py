"""Removes a testbed when its owner is gone: namespaces, what runs in them, scratch directories.

A process of its own that waits for the end of a pipe (its standard input), so that it also acts
when the owner is killed with -9:

    python watcher.py PREFIX [DIRECTORY…] < pipe

``reap_stale`` does the same for beds whose owner and watcher both are gone: a prefix names its
owner's process and when that started. Standard library only, because it must start fast and last.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

NETNS = Path("/run/netns")
SCRATCH = (Path("/dev/shm"), Path("/var/tmp"))  # where a bed may keep files below its prefix
_PREFIX = re.compile(r"(pcbed-(\d+)-(\d+)-\d+)(?:-|$)")
KILL_ROUNDS = 50


def started(pid: int) -> int | None:
    """Return when process ``pid`` started, in ticks since boot; None where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def prefix_of_this_process(number: int) -> str:
    """Return the prefix of this process's bed ``number``."""
    pid = os.getpid()
    return f"pcbed-{pid}-{started(pid)}-{number}"


def namespaces(prefix: str) -> list[str]:
    """Return the names of the namespaces of the bed ``prefix``."""
    if not NETNS.is_dir():
        return []
    return sorted(each.name for each in NETNS.iterdir() if each.name.startswith(prefix + "-"))


def processes_in(names: list[str]) -> list[int]:
    """Return the processes that run in the namespaces ``names``."""
    inodes = set()
    for name in names:
        try:
            inodes.add((NETNS / name).stat().st_ino)
        except OSError:
            continue
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                inode = (entry / "ns/net").stat().st_ino
            except OSError:
                continue
            if inode in inodes:
                found.append(int(entry.name))
    return found


def remove(prefix: str, directories: list[Path]) -> None:
    """Kill what runs in the bed ``prefix`` and remove its namespaces and ``directories``."""
    names = namespaces(prefix)
    for _ in range(KILL_ROUNDS):
        left = [pid for pid in processes_in(names) if pid != os.getpid()]
        if not left:
            break
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
    if names:
        lines = "".join(f"netns delete {name}\n" for name in names)
        subprocess.run(
            ["ip", "-force", "-batch", "-"], input=lines, text=True, check=False,
            capture_output=True,
        )  # fmt: skip
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def reap_stale() -> list[str]:
    """Remove every bed whose owner is dead, and return their prefixes."""
    seen: dict[str, bool] = {}
    places = [each for each in (NETNS, *SCRATCH) if each.is_dir()]
    for entry in (entry for place in places for entry in place.iterdir()):
        match = _PREFIX.match(entry.name)
        if match and match[1] not in seen:
            seen[match[1]] = started(int(match[2])) != int(match[3])
    stale = [prefix for prefix, is_stale in seen.items() if is_stale]
    for prefix in stale:
        remove(prefix, [place / prefix for place in SCRATCH])
    return stale


def main() -> None:
    """Wait for the owner's end, then remove its bed."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # it ends with its owner, never before
    sys.stdin.buffer.read()
    remove(sys.argv[1], [Path(each) for each in sys.argv[2:]])


if __name__ == "__main__":
    main()
