"""The same planner, sessions and coordinator under a virtual clock and network."""
