"""Every message and record that crosses a process boundary, as strict pydantic models.

``plan``: lanes of a deployment plan. ``calls`` and ``access``: the coordinator's REST. ``records``:
what the coordinator stores. ``events``: events and the event stream. ``training``: training jobs,
evaluation and evidence. ``command_results``: output of commands with --json. Data only, no logic.
"""

from paceline.schemas.base import Record, canonical_json, digest_of, new_run_id

__all__ = ["Record", "canonical_json", "digest_of", "new_run_id"]
