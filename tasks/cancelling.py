"""Nothing is published or promoted after a cancel was acknowledged (I11)."""

from __future__ import annotations

from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.runtime import flow_run

from paceline.errors import Cancelled


def stop_if_cancelled() -> None:
    """Raise Cancelled where Prefect says that the flow run we are in, or its parent, is cancelled.

    Outside a flow run there is nobody who could have cancelled through Prefect.
    """
    if found := cancelled_flow_run():
        raise Cancelled(
            "the run was cancelled",
            got="a cancelled flow run",
            wanted="a running flow",
            where=f"flow run {found}",
            do="Start it again: it goes on from where it was.",
        )


def cancelled_flow_run() -> str | None:
    """Return which flow run, ours or the outermost, somebody cancelled in Prefect; None if none."""
    if not flow_run.get_id():
        return None
    ids = {str(each) for each in (flow_run.get_id(), flow_run.get_root_flow_run_id()) if each}
    with get_client(sync_client=True) as client:
        for each in sorted(ids):
            state = client.read_flow_run(UUID(each)).state
            if state and state.type in {StateType.CANCELLING, StateType.CANCELLED}:
                return each
    return None
