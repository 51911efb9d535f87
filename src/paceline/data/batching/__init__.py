"""Which pieces of which documents make which row of which batch: four ways, all pure.

Each way is a Plan: from the lengths of a group's documents it gives the rows of that group, in the
order they come. Plans hold no tokens and know no ranks; ``fill`` copies tokens into a plan's rows.
"""

from __future__ import annotations

from paceline.data.batching.plans import BucketedPlan, CarriedPlan, PackedPlan, WindowPlan
from paceline.data.batching.rows import Plan, Rows

__all__ = ["BucketedPlan", "CarriedPlan", "PackedPlan", "Plan", "Rows", "WindowPlan"]
