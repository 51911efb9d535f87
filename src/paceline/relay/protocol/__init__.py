"""What to ask of whom, and what to do when it fails: ``session.RelaySession``. No I/O, no clock.

``pulling`` keeps lanes full. ``flights`` are the books: works that tile the model (``lanes``),
streams (``feeds``), what is here, on its way, or asked on the side. ``choosing`` says who may be
asked, ``windows`` how much, ``patience`` how long to wait, and ``asking`` asks. ``aside`` is what
is fetched beside a lane's stream: ``repairs`` of corrupt runs, ``hedging`` of the last pieces,
``returning`` from a spare. ``budget`` is the origin's share, ``events`` all that is heard and said,
``extents`` how ranges of pieces add up, ``limits`` the numbers.
"""
