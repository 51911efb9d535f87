"""Where a deployment's manifest may come from: the object store, or directories the profile allows.

No redirects, no other schemes: a caller names a model, never a host to be called.
"""

from __future__ import annotations

from paceline.manifest import Manifest, fetch_manifest
from paceline.manifest.signing import TrustPolicy
from paceline.profile import Runtime
from paceline.relay.sources import allowed_source


def manifest_at(url: str, runtime: Runtime) -> Manifest:
    """Return the manifest at ``url``: an S3 URL, or a directory that may be a source.

    Raises AccessDenied where neither may be one, UntrustedManifest where the profile wants a
    signature that it has not.
    """
    source = allowed_source(url, runtime)
    security = runtime.profile.security
    trust = TrustPolicy.of(security.trusted_publishers, required=security.require_signature)
    objects = None
    if source.startswith("s3://"):
        from paceline.objects import ObjectStore

        objects = ObjectStore.from_runtime(runtime)
    return fetch_manifest(source, objects, trust)
