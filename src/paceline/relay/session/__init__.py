"""What to ask of whom, and what to do when it fails: ``session.RelaySession``. No I/O, no clock.

``pulling`` asks, over ``lanes`` (works that tile the model), ``feeds`` (streams and what is in
flight on them), ``patience`` (deadlines), ``repairs`` (corrupt runs), ``hedging`` (last pieces) and
``budget`` (the origin's share). ``events`` is all it hears and says, ``extents`` how ranges of
pieces add up, ``limits`` its numbers.
"""
