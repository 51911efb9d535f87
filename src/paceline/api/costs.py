"""REST route of what trainings and jobs cost, for whoever has no state directory."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Query

from paceline.api.routes import COSTS
from paceline.config import Runtime
from paceline.jobs import JobTable, training_costs
from paceline.schemas import TrainingCosts


def make_cost_router(runtime: Runtime, table: JobTable) -> APIRouter:
    """Return the route; prices are those of ``runtime``'s profile, as they are now."""
    router = APIRouter(tags=["jobs"])

    @router.get(COSTS)
    def get_training_costs(
        team: Annotated[str, Query(max_length=63)] = "",
        project: Annotated[str, Query(max_length=100)] = "",
    ) -> TrainingCosts:
        """Return what trainings and each attempt of a job used: of this team and this project."""
        found = training_costs(table.jobs(), runtime, time.time())
        if not team and not project:
            return found
        usages = tuple(
            each
            for each in found.usages
            if team in ("", each.team) and project in ("", each.project)
        )
        return found.model_copy(update={"usages": usages, "without_result": 0})

    return router
