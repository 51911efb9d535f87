"""A certificate that signs itself, as a private S3 server has."""

from __future__ import annotations

import subprocess
from pathlib import Path


def self_signed(directory: Path, address: str) -> tuple[Path, Path]:
    """Make a certificate for the IP ``address``; return its file and its key's."""
    cert, key = directory / "s3.pem", directory / "s3.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=s3", "-addext", f"subjectAltName=IP:{address}"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
        timeout=30,
    )
    return cert, key
