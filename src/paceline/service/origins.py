"""Where a deployment's manifest may come from: the object store, or directories the profile allows.

No redirects, no other schemes: a caller names a model, never a host to be called.
"""

from __future__ import annotations

from pathlib import Path

from paceline.errors import InvalidInput
from paceline.manifest import Manifest, fetch_manifest
from paceline.manifest.signing import TrustPolicy, verify_signature
from paceline.profile import Runtime
from paceline.relay.sources import below_roots


def manifest_at(url: str, runtime: Runtime) -> Manifest:
    """Return the manifest at ``url``: an S3 URL, or a directory that may be a source.

    Raises UntrustedManifest where the profile wants a signature that it has not.
    """
    if "\0" in url:
        raise InvalidInput("not a source URL", got="a NUL in it", wanted="s3://bucket/prefix")
    security = runtime.profile.security
    trust = TrustPolicy.of(security.trusted_publishers, required=security.require_signature)
    if url.startswith("s3://"):
        from paceline.objects import ObjectStore

        manifest = fetch_manifest(url, ObjectStore.from_runtime(runtime))
    else:
        if "://" in url or not Path(url).is_absolute():
            raise InvalidInput("not a source URL", got=url, wanted="s3://bucket/prefix")
        directory = below_roots(Path(url), (runtime.state_dir, *security.source_roots))
        manifest = fetch_manifest(str(directory), None)
    verify_signature(manifest, trust, where=url)
    return manifest
