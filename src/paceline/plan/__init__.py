"""Plans the transfers of a deployment: from workers and a manifest to lanes and their cost.

It works on topologies, racks and rates. Pure functions: no sockets, no clock, no randomness beyond
the plan's seed; the same inputs give the same plan on a standby, in a test and in the simulator.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
