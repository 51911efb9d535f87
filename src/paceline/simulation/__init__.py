"""Simulates a deployment under a virtual clock and network: its duration and the cost of failures.

It runs the production planner, sessions and coordinator, and has no recovery logic of its own:
those decide everything that happens after a fault. This package models only what they run on:
links, disks, processes, time and faults.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
