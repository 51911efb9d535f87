"""Every message and record that crosses a process boundary, as strict pydantic models.

``plan``: lanes of a deployment plan. ``calls`` and ``access``: the coordinator's REST. ``records``:
what the coordinator stores. ``events``: events and the event stream. ``training``, ``evaluation``:
jobs, results, evidence. ``command_results``: output of commands with --json. Data only.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
