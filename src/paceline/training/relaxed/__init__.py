"""Replicas that do not wait for each other at every step: local SGD, and a parameter server.

``averaging`` lets each rank take some steps alone and then averages weights: a ``Parallel`` like
any other. ``server`` and ``worker`` share versioned weights: workers pull them and push gradients,
stale by no more than a bound (``ledger`` is the rule of it, without any I/O); a standby holds every
update that was acknowledged and takes over.
"""

from __future__ import annotations
