"""Replace a fleet's authority while it works: two are trusted for a time.

``add_authority`` makes the next one beside the one that signs, ``switch_authority`` has it sign,
``retire_authority`` ends the trust in the old one. Each is one atomic change of the directory
(``ca.pem``, ``ca.other.pem``, their keys, ``signing``); copies on replicas need no deletions. A
node accepts a new authority only with the signature of one that it trusts already (``endorse``).
Whether nodes are ready for the next step is decided by the caller.
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Collection
from pathlib import Path

from paceline.config import one_certificate
from paceline.errors import AccessDenied, Conflict
from paceline.relay.transport import (
    SIGNING_FILE,
    Authority,
    authorities,
    authority_key,
    fingerprint,
    make_other_authority,
)
from paceline.schemas import WorkerIdentity
from paceline.system import write_private

_PURPOSE = b"paceline authority\0"  # so that the signature is no certificate's


def add_authority(directory: Path) -> None:
    """Make the next authority, which is trusted and does not sign; raises Conflict."""
    signing, other = authorities(directory)
    if other is not None:
        raise Conflict(
            "the authority is being replaced already",
            got=f"two authorities, {_short(signing)} signs",
            where=directory,
            do="Go on with `paceline authority switch`, or `retire`.",
        )
    write_private(directory / SIGNING_FILE, fingerprint(signing.cert.read_bytes()).encode())
    make_other_authority(directory)


def switch_authority(directory: Path) -> None:
    """Have the next authority sign; raises Conflict where there is none."""
    signing, other = authorities(directory)
    if other is None or signing.cert.name != "ca.pem":
        raise Conflict(
            "there is no next authority",
            got=f"{_short(signing)} signs" + (", the old one is not retired" if other else ""),
            where=directory,
            do=f"Call `paceline authority {'retire' if other else 'add'}`.",
        )
    write_private(directory / SIGNING_FILE, fingerprint(other.cert.read_bytes()).encode())


def retire_authority(directory: Path) -> None:
    """End the trust in the authority that signed before, and destroy its key; raises Conflict."""
    signing, other = authorities(directory)
    if other is None or signing.cert.name == "ca.pem":
        raise Conflict(
            "there is no old authority",
            got=f"{_short(signing)} signs" + (", the next one waits" if other else ""),
            where=directory,
            do=f"Call `paceline authority {'switch' if other else 'add'}`.",
        )
    write_private(directory / "ca-key.pem", signing.key.read_bytes())
    write_private(directory / "ca.pem", signing.cert.read_bytes())
    signing.cert.unlink()
    signing.key.unlink()


def trusted_set(directory: Path) -> str | None:
    """Return a digest of the authorities that nodes trust, the signing one first.

    None before an authority was ever replaced.
    """
    if not (directory / SIGNING_FILE).is_file():
        return None
    signing, other = authorities(directory)
    found = [fingerprint(each.cert.read_bytes()) for each in (signing, other) if each is not None]
    return hashlib.sha256("".join(found).encode()).hexdigest()


def endorse(certificate: bytes, by: Authority) -> str:
    """Return the signature (hex) of one authority over the certificate of another."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256

    return authority_key(by).sign(_text(certificate), ec.ECDSA(SHA256())).hex()


def require_trusted(identity: WorkerIdentity, held: Collection[str]) -> None:
    """Raise AccessDenied unless each authority in the answer is known or endorsed by a known one.

    ``held`` are the fingerprints of the authorities that this node trusts.
    """
    given = [each.encode() for each in (identity.ca, identity.other_ca) if each is not None]
    signatures = dict(zip(given, identity.endorsements, strict=False))
    for pem in given:
        if fingerprint(pem) in held:
            continue
        known = [each for each in given if fingerprint(each) in held]
        if not any(_is_endorsed(pem, signatures.get(pem, ""), each) for each in known):
            raise AccessDenied(
                "the answer names another authority than the one that is trusted here",
                got=f"authority {fingerprint(pem)}",
                wanted=f"authority {' or '.join(held)}",
                do="Check the coordinator's authority; join again with a new token if it was"
                " replaced.",
            )


def _is_endorsed(certificate: bytes, signature: str, by: bytes) -> bool:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256

    key = x509.load_pem_x509_certificate(one_certificate(by)).public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return False
    try:
        key.verify(bytes.fromhex(signature), _text(certificate), ec.ECDSA(SHA256()))
    except (InvalidSignature, ValueError):
        return False
    return True


def _text(certificate: bytes) -> bytes:
    return _PURPOSE + ssl.PEM_cert_to_DER_cert(one_certificate(certificate).decode())


def _short(authority: Authority) -> str:
    return fingerprint(authority.cert.read_bytes())[:16]
