"""A deployment under a virtual clock and network: what it will take, and what failures cost.

It runs the production planner, sessions and coordinator, and has no recovery logic of its own:
whatever happens after a fault was decided there. Here are only what they stand on: links, disks,
processes, time, and what goes wrong.
"""

from paceline.simulation.scenario import Fault, Scenario, Timing, read_faults
from paceline.simulation.simulation import Simulation, simulate

__all__ = ["Fault", "Scenario", "Simulation", "Timing", "read_faults", "simulate"]
