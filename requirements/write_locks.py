"""Write the lock files beside this script: every wheel that ``make setup`` accepts, by SHA-256.

Run it with ``make lock`` (keeps today's versions where pyproject.toml allows) or ``make lock
ARGS=--upgrade``. uv resolves for every platform and every Python that pyproject.toml admits:

=================  ===============================================================================
base.lock          what a node needs: the distribution without extras
EXTRA.lock         what that extra adds (train.lock: without torch); two may name the same wheel
dev.lock           what tests and checks import besides
torch.lock         torch as the default index serves it (CUDA builds on Linux)
torch-cpu.lock     the same version's CPU builds, from ``PACELINE_TORCH_INDEX`` or uv's find-links
cuda.lock          the NVIDIA libraries that torch.lock's builds need
bootstrap.lock     uv itself
../benchmarks/peers/requirements-training.lock   the trainers that benchmarks compare with
=================  ===============================================================================

The files name no index: which one serves the wheels is the machine's configuration, and the hashes
decide what is accepted from it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PEERS = ROOT / "benchmarks" / "peers" / "requirements-training.txt"
CUDA = re.compile(r"(nvidia-(?!ml-py)|cuda-|triton$)")  # nvidia-ml-py is the extra gpu
FIND_LINKS = "UV_FIND_LINKS"  # a folder for ``write_cpu`` alone
HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})")

Blocks = dict[str, str]  # project name → its lines: pin, marker, hashes


def main() -> int:
    """Resolve, split by kind and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions allowed")
    upgrade = ["--upgrade"] if parser.parse_args().upgrade else []
    project = str(ROOT / "pyproject.toml")
    known = [] if upgrade else _constraints()

    found = resolve([project, "--all-extras", "--group", "dev", *known, *upgrade])
    with tempfile.TemporaryDirectory() as folder:
        pinned = Path(folder, "all.lock")  # every part below takes its versions from one resolution
        pinned.write_text("".join(found.values()))

        def part(*words: str) -> Blocks:
            return resolve([project, *words, "-c", str(pinned)])

        base = part()
        everything = part("--all-extras")
        extras = tomllib.loads(Path(project).read_text())["project"]["optional-dependencies"]
        torch = {"torch": everything["torch"]}
        cuda = {name: block for name, block in everything.items() if CUDA.match(name)}
        write("base", base)
        for extra in set(extras) - {"all"}:
            write(extra, _without(part("--extra", extra), base, torch, cuda))
    write("torch", torch)
    write("cuda", cuda)
    write("dev", _without(found, everything))
    write("bootstrap", resolve(["-"], given="uv\n"))
    write_cpu(re.search(r"torch==([0-9.]+)", torch["torch"]))
    peers = resolve([str(PEERS), "--no-deps"])
    peers.pop("torch")  # the trainers run on the torch of torch.lock or torch-cpu.lock
    PEERS.with_suffix(".lock").write_text("".join(peers.values()))
    return 0


def _without(blocks: Blocks, *others: Blocks) -> Blocks:
    """Return the projects of ``blocks`` that none of ``others`` has."""
    return {name: block for name, block in blocks.items() if not any(name in x for x in others)}


def resolve(words: list[str], given: str = "") -> Blocks:
    """Return what ``uv pip compile`` pins for these arguments, wheels only."""
    fixed = ("--universal", "--python-version", "3.11", "--only-binary", ":all:")
    printed = ("--generate-hashes", "--no-header", "--no-annotate", "--quiet", "--output-file")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.lock")
        command = [uv(), "pip", "compile", *words, *fixed, *printed, str(out)]
        environment = {name: value for name, value in os.environ.items() if name != FIND_LINKS}
        subprocess.run(command, check=True, input=given, text=True, env=environment)
        return blocks_of(out.read_text())


def write_cpu(version: re.Match[str] | None) -> None:
    """Add the CPU wheels of torch that are in reach to those that are known already."""
    assert version, "torch is not pinned"
    target, pin = HERE / "torch-cpu.lock", f"torch=={version[1]}+cpu"
    before = target.read_text() if target.is_file() else ""
    hashes = set(HASH.findall(before)) if before.startswith(pin + " ") else set()
    if index := os.environ.get("PACELINE_TORCH_INDEX"):
        served = resolve(["-", "--no-deps", "--default-index", index], given=pin)
        hashes |= set(HASH.findall(served.get("torch", "")))
    for folder in os.environ.get(FIND_LINKS, "").split():
        for wheel in Path(folder).glob(f"torch-{version[1]}+cpu-*.whl"):
            hashes.add(f"sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}")
    if not hashes:
        sys.exit(f"no wheel of {pin} in reach: set PACELINE_TORCH_INDEX to an index that has it")
    lines = " \\\n".join([pin, *(f"    --hash={each}" for each in sorted(hashes))])
    target.write_text(lines + "\n")


def blocks_of(text: str) -> Blocks:
    """Split a requirements file into its projects; one may have a version for each Python."""
    found: Blocks = {}
    for each in filter(str.strip, re.split(r"(?m)^(?=[A-Za-z0-9])", text)):
        name = re.split(r"[=\[ ]", each, maxsplit=1)[0]
        found[name] = found.get(name, "") + each
    return found


def write(name: str, blocks: Blocks) -> None:
    """Write one lock file."""
    (HERE / f"{name}.lock").write_text("".join(blocks.values()))


def uv() -> str:
    """Return uv's path: of the environment that runs this script."""
    return os.environ.get("UV") or str(Path(sys.executable).with_name("uv"))


def _constraints() -> list[str]:
    """Return the arguments that keep the versions of the locks as they are."""
    return [
        word
        for file in sorted(HERE.glob("*.lock"))
        if file.stem not in {"torch-cpu", "bootstrap"}
        for word in ("-c", str(file))
    ]


if __name__ == "__main__":
    sys.exit(main())
