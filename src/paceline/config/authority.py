"""Read the certificate of a trusted authority: exactly one, from a file or a response.

While an authority is replaced, another one is trusted beside it, in a file of its own
(``ca.other.pem`` beside ``ca.pem``), again with exactly one certificate.

OpenSSL trusts every certificate in a file, but a fingerprint covers only one. Input with more than
one PEM block is refused, and the result is the parsed certificate encoded again, not the input
bytes. Whether the authority is trusted is decided by the caller.
"""

from __future__ import annotations

from pathlib import Path

from paceline.errors import InvalidInput

MAX_BYTES = 64 * 1024
_BEGIN = b"-----BEGIN "


def one_certificate(pem: bytes, where: object = None) -> bytes:
    """Return the one certificate in ``pem``, encoded again; raises InvalidInput for anything else.

    Text around it is dropped.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    wanted = "exactly one certificate, as PEM"
    do = "Keep the one certificate of the authority in it, and nothing else."
    if len(pem) > MAX_BYTES or (blocks := pem.count(_BEGIN)) > 1:
        got = f"{len(pem)} bytes" if len(pem) > MAX_BYTES else f"{blocks} PEM blocks"
        raise InvalidInput(
            "more than an authority's certificate", got=got, wanted=wanted, where=where, do=do
        )
    try:
        (found,) = x509.load_pem_x509_certificates(pem)
        return found.public_bytes(Encoding.PEM)
    except (ValueError, x509.InvalidVersion) as error:
        raise InvalidInput(
            "not a certificate", got=error, wanted=wanted, where=where, do=do
        ) from error


def other_file(path: str | Path) -> Path:
    """Return where the authority stands that is trusted beside the one at ``path``."""
    return Path(path).with_suffix(".other.pem")


def read_other(path: str | Path) -> bytes:
    """Return the certificate that is trusted beside the one at ``path``, b"" where there is none.

    Raises InvalidInput unless the file holds exactly one.
    """
    other = other_file(path)
    return read_certificate(other) if other.is_file() else b""


def read_certificate(path: str | Path) -> bytes:
    """Return the one certificate in the file at ``path``, encoded again; raises InvalidInput."""
    try:
        with Path(path).open("rb") as file:
            return one_certificate(file.read(MAX_BYTES + 1), path)
    except OSError as error:
        raise InvalidInput(
            "an authority's certificate cannot be read", got=error.strerror, where=path
        ) from error
