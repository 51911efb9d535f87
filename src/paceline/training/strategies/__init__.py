"""Training with relaxed synchrony: local SGD, and an asynchronous parameter server.

``local_sgd`` lets each rank take several steps alone and then averages weights; it is a
``Parallel`` like any other. ``server`` and ``worker`` share versioned weights: workers pull them
and push gradients, stale by at most a bound (``port`` has the rule, without I/O); a standby
holds every acknowledged update and takes over. ``port`` is what a program hands in and gets back;
``job`` is the entry point of a rank in such a job (``benchmarks/synchrony.py`` does without jobs).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
