"""Batching: which pieces of which documents form which row of which batch, as pure plans.

There are four plans. A Plan maps the document lengths of a group of shards to that group's rows, in
order. Plans hold no tokens and do not depend on ranks; ``fill`` copies tokens into a plan's rows.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
