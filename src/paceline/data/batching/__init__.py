"""Batching: which pieces of which documents form which row of which batch, as pure plans.

There are four plans. A Plan maps the document lengths of a group of shards to that group's rows, in
order. Plans hold no tokens and do not depend on ranks; ``fill`` copies tokens into a plan's rows.
"""

from __future__ import annotations

from paceline.data.batching.plans import BucketedPlan, PackedPlan, StatefulPlan, WindowPlan
from paceline.data.batching.rows import Plan, Rows

__all__ = ["BucketedPlan", "PackedPlan", "Plan", "Rows", "StatefulPlan", "WindowPlan"]
