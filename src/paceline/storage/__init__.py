"""Object storage: the one package that talks to S3; models, data and checkpoints go through it.

``DiskStore`` has the same methods for directories of a local or shared disk. The package works on
buckets, keys and ranges, and does not depend on models, pieces or checkpoints.
"""

from paceline.storage.disk import DiskStore, open_store
from paceline.storage.store import ObjectStore
from paceline.storage.url import MAX_URL, ObjectInfo, join_url, lies_in, parse_url

__all__ = [
    "MAX_URL",
    "DiskStore",
    "ObjectInfo",
    "ObjectStore",
    "join_url",
    "lies_in",
    "open_store",
    "parse_url",
]
