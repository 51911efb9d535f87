"""The relay session's protocol logic: events and a time go in, actions come out. No I/O, no clock.

``session`` is the entry point and ``events`` lists its inputs and outputs. ``pulling`` keeps every
pull task supplied; ``pull_state`` is its state; ``source_selection`` chooses the source of a pull
task and holds the origin budget; ``deadlines`` computes timeouts and windows. ``side_requests``
sends requests outside a task's own stream: ``recovery`` of corrupt pieces, hedged requests and
failback to the planned source. ``extents`` are sets of piece numbers, ``limits`` the constants.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
