"""Plans the transfers of a deployment: from workers and a manifest to lanes and their cost.

It works on topologies, racks and rates. Pure functions: no sockets, no clock, no randomness beyond
the plan's seed; the same inputs give the same plan on a standby, in a test and in the simulator.
"""

from paceline.plan.cost import Prediction, origin_cap_bytes
from paceline.plan.inputs import PlanWorker, Standing, cross_rack_bytes, rack_of
from paceline.plan.make import make_plan
from paceline.plan.table import FleetDescription, plan_table, predict
from paceline.plan.trees import next_order

__all__ = [
    "FleetDescription",
    "PlanWorker",
    "Prediction",
    "Standing",
    "cross_rack_bytes",
    "make_plan",
    "next_order",
    "origin_cap_bytes",
    "plan_table",
    "predict",
    "rack_of",
]
