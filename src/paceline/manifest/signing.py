"""Signs manifests (Ed25519 over the digest), and decides which manifests are acceptable.

The signature is a field of the manifest that its digest does not cover, so a version has one digest
whether it is signed or not, and signature and manifest appear in one object at once. The signed
message is the digest with a prefix of its own, so that no other signature of the same key can be
passed off as one of these. Nothing is negotiable: one algorithm, RFC 8032.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import SecuritySettings
from paceline.errors import Conflict, InvalidInput, InvalidProfile, NotFound, UntrustedManifest
from paceline.manifest.model import Manifest, Signature
from paceline.schemas import SHA256_HEX
from paceline.system import create_durably, sync_directory

if TYPE_CHECKING:  # the library takes 20 ms to import; most manifests are not signed
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

CONTEXT = b"paceline-manifest/1 signed\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustPolicy:
    """What a manifest must be before any byte of its model moves; the default accepts any."""

    trusted: tuple[str, ...] = ()  # public keys, 64 hex digits each
    required: bool = False  # a signature by one of them
    fips: bool = False  # pieces are hashed with SHA-256

    @classmethod
    def of(cls, security: SecuritySettings) -> TrustPolicy:
        """Return the policy of a profile; raises InvalidProfile where no manifest could pass."""
        for key in security.trusted_publishers:
            if not re.fullmatch(SHA256_HEX, key):  # 32 bytes too
                raise InvalidProfile(
                    "not a public key",
                    got=repr(key)[:100],
                    wanted="64 lower-case hex digits, as `paceline keys new` prints them",
                    where="security.trusted_publishers",
                )
        if security.require_signature and not security.trusted_publishers:
            raise InvalidProfile(
                "signatures are required, and no publisher is trusted",
                got="an empty list",
                wanted="at least one public key",
                where="security.trusted_publishers",
                do="Add the publisher's key, or set security.require_signature = false.",
            )
        return cls(
            trusted=security.trusted_publishers,
            required=security.require_signature,
            fips=security.fips,
        )

    def check(self, manifest: Manifest, where: str = "") -> None:
        """Return when ``manifest`` is acceptable, else raise UntrustedManifest.

        A signature that is present must be valid under every policy.
        """

        sign = "Publish it with --sign and a trusted key."

        def refuse(what: str, got: object, wanted: object, do: str = sign) -> UntrustedManifest:
            here = where or f"{manifest.model_id}/{manifest.version}"
            return UntrustedManifest(what, got=got, wanted=wanted, where=here, do=do)

        if self.fips and manifest.piece_hash != "sha256":
            raise refuse(
                "this installation accepts only SHA-256 (security.fips)",
                f"pieces hashed with {manifest.piece_hash}",
                "pieces hashed with sha256",
                "Publish it as a new version with --piece-hash sha256.",
            )
        signature = manifest.signature
        if signature is None:
            if self.required:
                raise refuse("manifest is not signed", "no signature", self._wanted)
            return
        if not _matches(signature, manifest.digest):
            raise refuse(
                "manifest's signature is wrong",
                f"{signature.value[:16]}… by {signature.public_key[:16]}…",
                f"one over digest {manifest.digest}",
            )
        if self.required and signature.public_key not in self.trusted:
            raise refuse(
                "manifest is signed by an untrusted publisher", signature.public_key, self._wanted
            )

    @property
    def _wanted(self) -> str:
        return "a signature by " + " or ".join(f"{key[:16]}…" for key in self.trusted)


TRUST_ANY = TrustPolicy()


def new_key(path: Path) -> str:
    """Write a new private key to ``path`` (PEM, mode 0600) and return its public key.

    Raises Conflict where a file exists already: a key is never overwritten.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    try:
        create_durably(path, pem)
        sync_directory(path.parent)
    except FileExistsError as error:
        raise Conflict(
            "a file is there already", got=path, do="Choose another path; keys are not overwritten."
        ) from error
    except OSError as error:
        raise InvalidInput("cannot write a key there", got=error.strerror, where=path) from error
    return public_key(key)


def load_key(path: Path) -> Ed25519PrivateKey:
    """Return the private key in ``path``; raises NotFound, or InvalidInput where it is none."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    make = "Make one with `paceline keys new PATH`."
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise NotFound("no key there", got=path, do=make) from error
    except OSError as error:
        raise InvalidInput("key cannot be read", got=error.strerror, where=path) from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidInput(
            "not a private key", got=str(error)[:100], wanted="an Ed25519 key in PEM", where=path
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidInput(
            "not an Ed25519 key", got=type(key).__name__, wanted="Ed25519", where=path, do=make
        )
    return key


def public_key(key: Ed25519PrivateKey) -> str:
    """Return the public half of ``key`` as profiles write it (hex)."""
    return key.public_key().public_bytes_raw().hex()


def sign_manifest(manifest: Manifest, key: Ed25519PrivateKey) -> Manifest:
    """Return ``manifest`` signed by ``key``; its digest does not change."""
    value = key.sign(CONTEXT + manifest.digest.encode()).hex()
    return replace(manifest, signature=Signature(public_key(key), value))


def _matches(signature: Signature, digest: str) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.public_key))
        key.verify(bytes.fromhex(signature.value), CONTEXT + digest.encode())
    except (InvalidSignature, ValueError):
        return False
    return True
