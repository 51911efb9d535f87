"""Every message and record that crosses a process: strict models and their versions.

``plan`` says who feeds whom, ``calls`` is the coordinator's REST, ``records`` is what it keeps,
``events`` names what observers see, ``runs`` ties a run together. Nothing here does any work.
"""

from paceline.schemas.base import Record, canonical_json, digest_of, new_run_id

__all__ = ["Record", "canonical_json", "digest_of", "new_run_id"]
