"""Fetch of pinned code to this node: a commit or a directory, copied once, verified at each use."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from paceline.errors import CorruptData, InvalidInput, MissingTool, ServiceUnavailable
from paceline.training.user_code.reference import CodeRef, files_of, module_digest, tree_digest

FETCH_S = 120.0  # one git command


def fetch(ref: CodeRef, cache: Path) -> Path | None:
    """Return the directory from which to import ``ref``, verified; None for an installed module.

    A commit, or a directory, is copied into ``cache`` once, whole or not at all, and verified
    against its digest each time.
    """
    if ref.kind == "module":
        if ref.pin and (got := module_digest(ref.module)) != ref.pin:
            raise _changed(ref, got)
        return None
    name = hashlib.sha256(f"{ref.url}@{ref.pin}".encode()).hexdigest()
    tree, seal = cache / name, cache / f"{name}.sha256"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks of one node fetch once; git has a timeout
        if not seal.exists():
            shutil.rmtree(tree, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix="fetch-") as scratch:
                fresh = Path(scratch) / "tree"
                if ref.kind == "git":
                    _clone(ref, fresh)
                else:
                    _copy(ref.directory, fresh)
                seal_text = tree_digest(fresh)
                if ref.kind == "directory" and seal_text != ref.pin:
                    raise _changed(ref, seal_text)
                fresh.replace(tree)
            seal.write_text(seal_text)
        if (got_digest := tree_digest(tree)) != seal.read_text():
            shutil.rmtree(tree, ignore_errors=True)
            seal.unlink()
            raise CorruptData(
                "fetched code changed on disk",
                got=got_digest,
                where=tree,
                do="It is fetched again at the next start.",
            )
    return tree


def _copy(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise InvalidInput("code directory is not there", got="nothing", where=source)
    for path in files_of(source):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    if not target.exists():
        raise InvalidInput("code directory is empty", where=source)


def _clone(ref: CodeRef, target: Path) -> None:
    """Write the commit's files into ``target``: no credentials, hooks, submodules or helpers."""
    if shutil.which("git") is None:
        raise MissingTool("git is not installed", wanted="git", do="Install it on every node.")
    target.mkdir(parents=True)
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    environment = kept | {
        "HOME": str(target.parent),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "/bin/false",
        "GIT_ALLOW_PROTOCOL": ref.url.partition("://")[0],
    }
    options = [
        "-c",
        "core.hooksPath=/dev/null",
        "-c",
        "core.symlinks=false",
        "-c",
        "safe.directory=*",
    ]

    def git(*words: str) -> str:
        try:
            done = subprocess.run(
                ["git", *options, "-C", str(target), *words],
                capture_output=True,
                text=True,
                env=environment,
                timeout=FETCH_S,
                check=True,
            )
        except subprocess.TimeoutExpired as error:
            raise ServiceUnavailable(
                "code cannot be fetched", got=f"no answer in {FETCH_S:.0f} s", where=ref.url
            ) from error
        except subprocess.CalledProcessError as error:
            raise ServiceUnavailable(
                "code cannot be fetched",
                got=(error.stderr.strip().splitlines() or ["nothing said"])[-1][:300],
                wanted=f"commit {ref.pin}",
                where=ref.url,
            ) from error
        return done.stdout.strip()

    git("init", "-q")
    git("fetch", "-q", "--depth", "1", "--no-tags", "--no-recurse-submodules", ref.url, ref.pin)
    git("checkout", "-q", "--detach", ref.pin)
    if (got := git("rev-parse", "HEAD")) != ref.pin:
        raise CorruptData("another commit came", got=got, wanted=ref.pin, where=ref.url)
    shutil.rmtree(target / ".git")


def _changed(ref: CodeRef, got: str) -> CorruptData:
    return CorruptData(
        "code is not what the reference is pinned to",
        got=f"sha256:{got}",
        wanted=f"sha256:{ref.pin}",
        where=ref.url or ref.module,
    )
