"""Verifies that a directory is exactly one model: a full SHA-256 of every file, several at once.

The relay checks pieces as they arrive; this is the independent check (`verify --full`).
"""

from __future__ import annotations

import hashlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paceline.errors import CorruptData, InvalidManifest, SourceMissing
from paceline.manifest.build import scan
from paceline.manifest.model import FileEntry, Manifest

BLOCK = 1024 * 1024
MAX_THREADS = 16


def verify_directory(
    directory: Path | str, manifest: Manifest, *, allow_extra: bool = False
) -> None:
    """Return when every file of ``manifest`` is in ``directory`` with its bytes, and no other file
    except ``manifest.json`` (``allow_extra`` permits others); else raise CorruptData.
    """
    root = Path(directory)
    if not allow_extra:
        _refuse_extras(root, manifest)
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS)) as pool:
        # on a failure the running checks end, and no new one starts
        running = [pool.submit(_verify_file, root / file.path, file) for file in manifest.files]
        try:
            for each in running:
                each.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _refuse_extras(root: Path, manifest: Manifest) -> None:
    try:
        found = {file.path for file in scan(root)}
    except SourceMissing as error:
        raise CorruptData("model directory is missing", where=root, do=_AGAIN) from error
    except InvalidManifest as error:
        raise CorruptData(error.what, got=error.got, wanted=error.wanted, where=root) from error
    extra = sorted(found - {file.path for file in manifest.files})
    if extra:
        raise CorruptData(
            "directory holds files that the manifest does not name",
            got=", ".join(extra[:5]),
            wanted="the manifest's files only",
            where=root,
            do="Remove them.",
        )


def _verify_file(path: Path, file: FileEntry) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise CorruptData("file is missing", got=error.strerror, where=path, do=_AGAIN) from error
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != file.size:
            raise CorruptData(
                "file has another size",
                got=f"{status.st_size} bytes",
                wanted=f"{file.size} bytes",
                where=path,
                do=_AGAIN,
            )
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(min(BLOCK, max(1, file.size))))
        while got := stream.readinto(buffer):
            digest.update(buffer[:got])
    if digest.hexdigest() != file.sha256:
        raise CorruptData(
            "file does not match its digest",
            got=digest.hexdigest(),
            wanted=file.sha256,
            where=path,
            do=_AGAIN,
        )


_AGAIN = "Distribute the version again."
