"""Signatures of manifests, and which manifests an installation accepts."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from paceline.config import SecuritySettings
from paceline.errors import (
    Conflict,
    InvalidInput,
    InvalidManifest,
    InvalidProfile,
    NotFound,
    UntrustedManifest,
)
from paceline.manifest import (
    Manifest,
    TrustPolicy,
    build_manifest,
    fetch_manifest,
    load_key,
    new_key,
    parse_manifest,
    public_key,
    sign_manifest,
    write_manifest,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "weights").write_bytes(b"w" * 100_000)
    return directory


@pytest.fixture
def manifest(model: Path) -> Manifest:
    return build_manifest(model, model_id="m", version="1", link_mbit=40)


@pytest.fixture
def key(tmp_path: Path) -> Ed25519PrivateKey:
    new_key(tmp_path / "key")
    return load_key(tmp_path / "key")


def only(*keys: Ed25519PrivateKey) -> TrustPolicy:
    publishers = tuple(public_key(key) for key in keys)
    return TrustPolicy.of(SecuritySettings(trusted_publishers=publishers, require_signature=True))


def test_a_signed_manifest_keeps_its_digest_and_is_believed(
    manifest: Manifest, key: Ed25519PrivateKey
) -> None:
    signed = sign_manifest(manifest, key)
    assert signed.digest == manifest.digest
    arrived = parse_manifest(signed.to_bytes())
    assert arrived == signed
    TrustPolicy().check(arrived)
    only(Ed25519PrivateKey.generate(), key).check(arrived)


def test_an_unsigned_manifest_passes_only_where_none_is_required(manifest: Manifest) -> None:
    TrustPolicy().check(manifest)
    with pytest.raises(UntrustedManifest, match=r"not signed.*--sign"):
        only(Ed25519PrivateKey.generate()).check(manifest)


def test_an_untrusted_signature_is_refused_where_signatures_are_required(
    manifest: Manifest, key: Ed25519PrivateKey
) -> None:
    signed = sign_manifest(manifest, key)
    with pytest.raises(UntrustedManifest, match=f"untrusted.*{public_key(key)}"):
        only(Ed25519PrivateKey.generate()).check(signed)


def test_a_signature_of_other_content_is_wrong_whatever_the_policy(
    manifest: Manifest, model: Path, key: Ed25519PrivateKey
) -> None:
    other = build_manifest(model, model_id="m", version="2", link_mbit=40)
    stolen = replace(other, signature=sign_manifest(manifest, key).signature)
    for policy in (TrustPolicy(), only(key)):
        with pytest.raises(UntrustedManifest, match="wrong"):
            policy.check(stolen)


def test_any_flipped_bit_of_a_signature_is_noticed(
    manifest: Manifest, key: Ed25519PrivateKey
) -> None:
    signature = sign_manifest(manifest, key).signature
    assert signature is not None
    for field, size in (("value", 64), ("public_key", 32)):
        raw = bytearray.fromhex(getattr(signature, field))
        for at in range(size):
            raw[at] ^= 1
            forged = replace(signature, **{field: raw.hex()})
            with pytest.raises(UntrustedManifest):
                only(key).check(replace(manifest, signature=forged))
            raw[at] ^= 1


def test_the_digest_alone_is_not_what_is_signed(manifest: Manifest, key: Ed25519PrivateKey) -> None:
    value = key.sign(manifest.digest.encode()).hex()  # for another purpose, say
    signature = sign_manifest(manifest, key).signature
    assert signature is not None
    with pytest.raises(UntrustedManifest, match="wrong"):
        TrustPolicy().check(replace(manifest, signature=replace(signature, value=value)))


def test_fetching_refuses_before_anything_moves(
    manifest: Manifest, model: Path, key: Ed25519PrivateKey
) -> None:
    write_manifest(model, manifest)
    with pytest.raises(UntrustedManifest, match=str(model)):
        fetch_manifest(str(model), None, only(key))
    write_manifest(model, sign_manifest(manifest, key))
    assert fetch_manifest(str(model), None, only(key)).digest == manifest.digest
    assert issubclass(UntrustedManifest, InvalidManifest)


def test_a_new_key_is_private_and_never_replaces_another(tmp_path: Path) -> None:
    public = new_key(tmp_path / "key")
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert public_key(load_key(tmp_path / "key")) == public
    with pytest.raises(Conflict):
        new_key(tmp_path / "key")
    assert public_key(load_key(tmp_path / "key")) == public
    with pytest.raises(InvalidInput):
        new_key(tmp_path / "nowhere/key")


def test_what_is_no_ed25519_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="paceline keys new"):
        load_key(tmp_path / "none")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(InvalidInput, match="not a private key"):
        load_key(tmp_path / "text")
    (tmp_path / "x25519").write_bytes(
        X25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    with pytest.raises(InvalidInput, match="Ed25519"):
        load_key(tmp_path / "x25519")


@pytest.mark.parametrize("bad", ["", "xyz", "A" * 64, "0" * 63])
def test_a_policy_of_what_is_no_key_is_refused(bad: str) -> None:
    with pytest.raises(InvalidProfile, match="trusted_publishers"):
        TrustPolicy.of(SecuritySettings(trusted_publishers=(bad,)))


def test_a_policy_without_trusted_publishers_is_refused() -> None:
    with pytest.raises(InvalidProfile, match="no publisher is trusted"):
        TrustPolicy.of(SecuritySettings(require_signature=True))


def test_a_fips_installation_accepts_only_pieces_hashed_with_sha256(
    manifest: Manifest, model: Path
) -> None:
    policy = TrustPolicy.of(SecuritySettings(fips=True))
    with pytest.raises(UntrustedManifest, match=r"security\.fips.*blake3.*sha256.*--piece-hash"):
        policy.check(manifest)
    policy.check(
        build_manifest(model, model_id="m", version="1", link_mbit=40, piece_hash="sha256")
    )
