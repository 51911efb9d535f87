"""The coordinator's decisions as a state machine without I/O: events and a time in, effects out."""
