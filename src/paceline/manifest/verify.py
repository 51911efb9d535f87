"""Verifies that a directory is exactly one model: every byte again, several files at once."""

from __future__ import annotations

import stat
from pathlib import Path

from paceline.errors import AccessDenied, CorruptData, InvalidManifest, SourceChanged, SourceMissing
from paceline.manifest.build import Digesting, ScannedFile, scan_model
from paceline.manifest.model import FileEntry, Manifest

_AGAIN = "Distribute the version again."


def verify_directory(
    directory: Path | str, manifest: Manifest, *, allow_extra: bool = False, full: bool = False
) -> None:
    """Return when every file of ``manifest`` is in ``directory`` with its bytes, and no other file
    except ``manifest.json`` (``allow_extra`` permits others); else raise CorruptData.

    Bytes are compared by the digests of their pieces and, if ``full``, also by the SHA-256 of files
    and chunks.
    """
    root = Path(directory)
    if not allow_extra:
        _refuse_extras(root, manifest)
    found = [_scanned(root, file) for file in manifest.files]
    reading = Digesting(
        root, found, manifest.piece_bytes, manifest.piece_hash, only_pieces=not full
    )
    try:
        files, checksums = reading.run([chunk.size for chunk in manifest.chunks])
    except (SourceChanged, AccessDenied) as error:
        raise error.as_kind(CorruptData, wanted=None, do=_AGAIN) from error
    for got, wanted in zip(files, manifest.files, strict=True):
        wrong = [
            n
            for n, pair in enumerate(zip(got.pieces, wanted.pieces, strict=True))
            if pair[0] != pair[1]
        ]
        if wrong or (full and got.sha256 != wanted.sha256):
            raise CorruptData(
                "file does not match its digest",
                got=f"piece {wrong[0]} differs" if wrong else got.sha256,
                wanted=f"{manifest.piece_hash} of each piece" if wrong else wanted.sha256,
                where=root / wanted.path,
                do=_AGAIN,
            )
    for checksum, chunk in zip(checksums, manifest.chunks, strict=True):
        if full and checksum != chunk.checksum:
            raise CorruptData(
                f"chunk {chunk.chunk_id} does not match its checksum",
                got=checksum,
                wanted=chunk.checksum,
                where=root,
                do="Publish the model again: its manifest contradicts itself.",
            )


def _refuse_extras(root: Path, manifest: Manifest) -> None:
    try:
        found = {file.path for file in scan_model(root)}
    except SourceMissing as error:
        raise CorruptData("model directory is missing", where=root, do=_AGAIN) from error
    except InvalidManifest as error:
        raise error.as_kind(CorruptData, where=root, do=None) from error
    extra = sorted(found - {file.path for file in manifest.files})
    if extra:
        raise CorruptData(
            "directory holds files that the manifest does not name",
            got=", ".join(extra[:5]),
            wanted="the manifest's files only",
            where=root,
            do="Remove them.",
        )


def _scanned(root: Path, file: FileEntry) -> ScannedFile:
    path = root / file.path
    try:
        status = path.lstat()
    except OSError as error:
        raise CorruptData("file is missing", got=error.strerror, where=path, do=_AGAIN) from error
    if not stat.S_ISREG(status.st_mode) or status.st_size != file.size:
        raise CorruptData(
            "file has another size",
            got=f"{status.st_size} bytes",
            wanted=f"{file.size} bytes",
            where=path,
            do=_AGAIN,
        )
    return ScannedFile(file.path, status.st_size, status.st_mtime_ns)
