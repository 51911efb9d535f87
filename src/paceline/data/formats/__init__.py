"""File formats: readers of source files (text, JSONL, Parquet, tar), and the shard format.

Each reader is a generator over one local file, in the file's own order, that holds one sample (for
Parquet: a few rows) in memory. Does not depend on splits or stores.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
