"""Data sets: immutable snapshots of sharded samples in S3 or on disk, streamed, packed, validated.

A snapshot is named by its content: the same files, split and labels give the same digest. Does not
depend on models or training; imports pandas and Great Expectations only to validate a snapshot.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
