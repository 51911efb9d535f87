"""What this machine has: the speed of its network interface and of a disk, and its GPUs.

Linux only; what cannot be found is None or empty. Nothing here talks to another machine.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import struct
import subprocess
import time
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_PROBE_PORT = 9  # nothing is sent: connecting a datagram socket only selects the route
WRITE_BYTES = 32 * 1024 * 1024
WRITE_S = 1.0  # a slow disk's measurement ends here
GPU_S = 10.0


def interface_to(host: str) -> str | None:
    """Return the name of the network interface on the route to ``host``; IPv4 only."""
    import fcntl

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, _PROBE_PORT))
            address = socket.inet_aton(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                with suppress(OSError):  # an interface without an IPv4 address
                    answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                    if answer[20:24] == address:
                        return name
    except OSError:
        return None
    return None


def interface_mbit(name: str) -> float | None:
    """Return the link speed that the driver reports, in Mbit/s; None for a virtual one."""
    directory = Path("/sys/class/net") / name
    if not _is_hardware(directory):  # veth says 10,000 whatever it runs on
        return None
    try:
        speed = int((directory / "speed").read_text())
    except (OSError, ValueError):
        return None
    return float(speed) if speed > 0 else None


def _is_hardware(directory: Path) -> bool:
    """Return whether an interface is a device, or a bond, bridge or VLAN of one."""
    lower = directory.glob("lower_*")
    return (directory / "device").exists() or any(_is_hardware(each.resolve()) for each in lower)


def write_bytes_s(directory: Path, size_bytes: int = WRITE_BYTES) -> float:
    """Return how fast ``directory``'s disk takes blocks of 4 MiB, each synced, in bytes/s.

    It ends after ``size_bytes`` or ``WRITE_S``. Raises OSError where it refuses; the file is
    deleted.
    """
    block = os.urandom(4 * 1024 * 1024)
    path = directory / f".speed-{os.getpid()}"
    began = time.monotonic()
    try:
        with path.open("xb") as file:
            while file.tell() < size_bytes:
                file.write(block)
                file.flush()
                os.fdatasync(file.fileno())
                written = file.tell()
                if (seconds := time.monotonic() - began) > WRITE_S:
                    break
        return written / max(seconds, 1e-6)
    finally:
        path.unlink(missing_ok=True)


def processor() -> tuple[str, set[str]]:
    """Return the processor's model ("unknown" where it has no name) and its flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:  # not Linux
        return platform.processor() or "unknown", set()
    said = {
        key.strip().lower(): value.strip() for key, _, value in (x.partition(":") for x in lines)
    }
    flags = said.get("flags") or said.get("features") or ""
    return said.get("model name") or platform.processor() or "unknown", set(flags.split())


def gpus() -> tuple[str, ...] | None:
    """Return a line for each NVIDIA GPU (name, memory, driver); None where the driver fails."""
    if shutil.which("nvidia-smi") is None:
        return None if Path("/dev/nvidiactl").exists() else ()
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=GPU_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())
