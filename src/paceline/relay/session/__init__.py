"""What to ask of whom, and what to do when it fails: ``session.RelaySession``. No I/O, no clock.

``pulling`` asks. ``flights`` are the books: works that tile the model (``lanes``), streams
(``feeds``), what is here, on its way, or asked on the side. ``choosing`` says who may be asked,
``windows`` how much, ``patience`` how long to wait; ``repairs`` are corrupt runs, ``hedging`` the
last pieces, ``returning`` the way back from a spare, ``budget`` the origin's share. ``events`` is
all it hears and says, ``extents`` how ranges of pieces add up, ``limits`` its numbers.
"""
