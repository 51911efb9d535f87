"""Hosts that share nothing but the network, for journeys.

Each host is a network namespace with a limited link, a mount namespace whose root is an overlay of
this machine's root (what a host writes, no other sees), a process namespace, and a user of its
own. /tmp, /run, /dev/shm and the homes are empty; the checkout is not there. The software is one
wheel, built from the checkout and installed below ``/opt/paceline``, which is mounted read-only.
A journey types commands on hosts; it imports nothing of ``paceline``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pip

from benchmarks.testbed import Testbed, start
from tests.support.wall_jump import jump, preloaded

ROOT = Path(__file__).parents[2]
SOFTWARE = Path("/opt/paceline")
NEXT_SOFTWARE = Path("/opt/paceline-next")  # where ``Host.upgrade`` takes it from
USER_ID = 20_000  # of host 0; each further host has the next one
# Limits end a hang: a slow machine with other tests beside needs several times what an idle one
# does.
COMMAND_S = 600.0
BUILD_S = 600.0
PATIENCE = 3.0  # times what a test of an idle machine waits for

# Runs as the first process of the host's namespaces: $1 the overlay's directory, $2 the checkout,
# $3 the software, $4 the user id, $5 where the software lies on hosts, $6 the interpreter, $7 the
# host's name, $8 the next software and $9 its place (both may be empty).
_BOOT = r"""
set -e
mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
cd "$1/root"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount --rbind /dev dev
for each in dev/shm tmp var/tmp run root home; do mount -t tmpfs -o mode=1777 tmpfs "$each"; done
mkdir -p ".$2" # where it lies below one of those
mount -t tmpfs -o mode=755 tmpfs ".$2"
mkdir -p ".$5" home/user
mount --bind "$3" ".$5"
mount -o remount,bind,ro ".$5"
if [ -n "$8" ]; then mkdir -p ".$9"; mount --bind "$8" ".$9"; mount -o remount,bind,ro ".$9"; fi
mkdir -p ".$6"
mount --bind "$6" ".$6"
mount -o remount,bind,ro ".$6"
chown "$4:$4" home/user
chmod 700 home/user
hostname "$7"
exec chroot . sleep infinity
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str

    def ok(self) -> Ended:
        """Return this where the command succeeded; fails the test with its output where not."""
        assert self.code == 0, f"{shlex.join(self.argv)}: exit {self.code}\n{self.out}\n{self.err}"
        return self


class Host:
    """One machine: run commands on it as its user."""

    def __init__(
        self,
        bed: Testbed,
        index: int,
        address: str,
        directory: Path,
        software: Path,
        upgrade_to: Path | None = None,
    ):
        self.address, self.index = address, index
        self.uid = USER_ID + index
        for each in ("upper", "work", "root"):
            (directory / each).mkdir(parents=True)
        boot = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--ipc", "--uts"]
        arguments = [str(directory), str(ROOT), str(software), str(self.uid), str(SOFTWARE)]
        arguments += [interpreter_of(software), f"host-{index}"]
        arguments += [str(upgrade_to or ""), str(NEXT_SOFTWARE)]
        self._init = bed.popen(
            index,
            [*boot, "sh", "-c", _BOOT, "boot", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self._started: list[subprocess.Popen[Any]] = []
        self._pid = self._wait_until_booted()

    def _wait_until_booted(self) -> int:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            assert self._init.poll() is None, self._init.stderr and self._init.stderr.read()
            children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children")
            for pid in children.read_text().split():
                if Path(f"/proc/{pid}/comm").read_text().strip() == "sleep":
                    return int(pid)
            time.sleep(0.02)
        raise AssertionError(f"host {self.index} did not boot")

    def _inside(
        self, argv: Sequence[str], env: Mapping[str, str], *, root: bool, at: str = ""
    ) -> list[str]:
        variables = {
            "PATH": f"{SOFTWARE}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root" if root else "/home/user",
            "LANG": "C.UTF-8",
            **env,
        }
        user = [] if root else [f"--setuid={self.uid}", f"--setgid={self.uid}"]
        return [
            *("nsenter", f"--target={self._pid}", "--mount", "--pid", "--net", "--ipc", "--uts"),
            *("--root", f"--wd=/proc/{self._pid}/root{at or variables['HOME']}", *user),
            "--",
            *("env", "-i", *(f"{key}={value}" for key, value in variables.items()), *argv),
        ]

    def run(
        self,
        *argv: str,
        env: Mapping[str, str] | None = None,
        root: bool = False,
        at: str = "",
    ) -> Ended:
        """Run a command to its end, as the host's user, in its home unless ``at`` says where."""
        done = subprocess.run(
            self._inside(argv, env or {}, root=root, at=at),
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        return Ended(argv, done.returncode, done.stdout, done.stderr)

    def start(
        self,
        *argv: str,
        log: Path,
        env: Mapping[str, str] | None = None,
        root: bool = False,
        at: str = "",
    ) -> subprocess.Popen[Any]:
        """Start a command that goes on; its output goes to ``log`` (outside of the host)."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                self._inside(argv, env or {}, root=root, at=at),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def write(self, path: str, content: str | bytes) -> None:
        """Write a file as the host's user, mode 0600."""
        script = 'umask 077; mkdir -p "$(dirname "$1")"; cat > "$1"'
        subprocess.run(
            self._inside(["sh", "-c", script, "write", path], {}, root=False),
            input=content.encode() if isinstance(content, str) else content,
            check=True,
            timeout=COMMAND_S,
        )

    def copy(self, path: str, to: Host, into: str = "") -> None:
        """Copy what is below the home to another host, as ``scp -pr PATH HOST:INTO`` does."""
        where, _, name = path.rpartition("/")
        packed = self.run(
            "sh", "-c", 'tar -C "$1" -cf - "$2" | base64 -w0', "tar", where or ".", name
        )
        to.write("copied", packed.ok().out)
        to.run(
            "sh", "-c", 'base64 -d copied | tar -C "$1" -xpf -; rm copied', "tar", into or "."
        ).ok()

    def upgrade(self) -> None:
        """Put the next software in the place of the present one; processes that run keep theirs."""
        argv = ("mount", "--bind", str(NEXT_SOFTWARE), str(SOFTWARE))
        self.run(*argv, root=True).ok()

    def power_off(self) -> None:
        """End every process of the host at once."""
        if self._init.poll() is None:
            os.kill(self._pid, signal.SIGKILL)
        self._init.wait(20)
        for each in self._started:
            each.wait(20)
        if self._init.stderr is not None:
            self._init.stderr.close()


class Site:
    """Hosts on one network, and a machine outside (``origin``) for servers of others."""

    def __init__(
        self,
        bed: Testbed,
        directory: Path,
        software: Sequence[Path],
        upgrade_to: Path | None = None,
    ) -> None:
        self.bed = bed
        self._directory, self._software = directory, list(software)
        self.hosts = [
            Host(bed, each.index, each.address, directory / each.name, installed, upgrade_to)
            for each, installed in zip(bed.hosts, software, strict=True)
        ]

    def replace(self, host: Host) -> Host:
        """Lose a host with its disk; return a fresh machine that has its address."""
        place = next(n for n, each in enumerate(self.hosts) if each.index == host.index)
        name = self.bed.hosts[place].name
        host.power_off()
        shutil.rmtree(self._directory / name)
        made = Host(
            self.bed, host.index, host.address, self._directory / name, self._software[place]
        )
        self.hosts[place] = made
        return made

    @property
    def enter_outside(self) -> list[str]:
        """Return the prefix of a command that runs on the network's outside machine."""
        return ["nsenter", f"--net=/run/netns/{self.bed.namespace('origin')}", "--"]

    def outside(self, argv: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        """Start a server on the network's outside machine; it has this machine's file system."""
        return self.bed.popen("origin", list(argv), **popen)


@contextmanager
def site(
    software: Path | Sequence[Path],
    hosts: int,
    rate_mbit: float = 200.0,
    racks: int = 1,
    origin_mbit: float | None = None,
    upgrade_to: Path | None = None,
) -> Iterator[Site]:
    """Yield a running site; all of it ends with the context.

    ``software``: one for all hosts, or one for each. ``origin_mbit``: the outside machine's rate.
    ``upgrade_to``: what ``Host.upgrade`` installs.
    """
    each = [software] * hosts if isinstance(software, Path) else list(software)
    with start(hosts=hosts, rate_mbit=rate_mbit, racks=racks, origin_mbit=origin_mbit) as bed:
        made = Site(bed, bed.scratch(memory=True) / "hosts", each, upgrade_to)
        try:
            yield made
        finally:
            for host in made.hosts:
                host.power_off()


def interpreter_of(software: Path) -> str:
    """Return the prefix of the Python that an environment uses."""
    settings = (software / "pyvenv.cfg").read_text().splitlines()
    (home,) = [each.partition("=")[2].strip() for each in settings if each.startswith("home")]
    return str(Path(home).resolve().parent)


def newest_python() -> str:
    """Return another, newer Python of this machine than the tests' own; "" where there is none."""
    for minor in range(14, sys.version_info.minor, -1):
        beside = Path(sys.base_prefix).parent.glob(f"3.{minor}.*/bin/python3")
        for each in (*map(str, beside), shutil.which(f"python3.{minor}")):
            works = [
                str(each),
                "-c",
                f"import ssl, venv, sys; assert sys.version_info[1] == {minor}",
            ]
            if each and subprocess.run(works, capture_output=True, check=False).returncode == 0:
                return str(each)
    return ""


def build_software(directory: Path, *locks: str, source: Path = ROOT, python: str = "") -> Path:
    """Build the wheel and install it, with the wheels of lock files, into a fresh environment.

    Types what the guide has under "Install" in ``source``, with ``python`` (default: the tests'
    own). Returns the directory that hosts see as ``/opt/paceline``.
    """
    from tests.journeys.guide import block  # which imports this module

    wheels, software = directory / "wheels", directory / "software"

    def do(*argv: str) -> None:
        done = subprocess.run(
            argv,
            cwd=source,
            env={**os.environ, "PYTHON": python or sys.executable},
            capture_output=True,
            text=True,
            timeout=BUILD_S,
            check=False,
        )
        assert done.returncode == 0, f"{shlex.join(argv)}\n{done.stdout}\n{done.stderr}"

    if not python:  # with this environment's pip: to unpack and compile another takes 5 s of CPU
        do(sys.executable, "-m", "venv", "--without-pip", str(software))
        (place,) = software.glob("lib/python*/site-packages")
        shutil.copytree(Path(pip.__file__).parent, place / "pip")
    do(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels))
    typed = block("Install").replace(str(SOFTWARE), str(software)).replace("dist/", f"{wheels}/")
    do(
        "bash",
        "-ec",
        typed.replace(
            "requirements/base.lock", " ".join(f"requirements/{each}.lock" for each in locks)
        ),
    )
    for script in (software / "bin").iterdir():  # they name the place where hosts have them
        content = b"" if script.is_symlink() or not script.is_file() else script.read_bytes()
        if (place := os.fsencode(software)) in content:  # others share inodes with uv's cache
            script.write_bytes(content.replace(place, os.fsencode(SOFTWARE), 1))
    return software


def clock_ahead(host: Host, shim: Path, seconds: int) -> dict[str, str]:
    """Return the environment of processes on ``host`` whose wall clock is ``seconds`` ahead."""
    host.write("clock.so", shim.read_bytes())
    host.write("clock", jump(seconds))
    return preloaded("/home/user/clock.so", "/home/user/clock")


def until(what: Callable[[], object], why: str, timeout_s: float = 30.0) -> None:
    """Wait until ``what`` is true; fails the test with ``why`` where it never is."""
    end = time.monotonic() + PATIENCE * timeout_s
    while not what():
        assert time.monotonic() < end, f"this never came: {why}"
        time.sleep(0.1)
