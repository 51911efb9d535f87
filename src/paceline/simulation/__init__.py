"""Simulates a deployment under a virtual clock and network: its duration and the cost of failures.

It runs the production planner, sessions and coordinator, and has no recovery logic of its own:
those decide everything that happens after a fault. This package models only what they run on:
links, disks, processes, time and faults.
"""

from paceline.simulation.scenario import Fault, Scenario, Timing, read_faults
from paceline.simulation.simulation import Simulation, simulate

__all__ = ["Fault", "Scenario", "Simulation", "Timing", "read_faults", "simulate"]
