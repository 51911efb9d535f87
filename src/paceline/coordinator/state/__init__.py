"""The coordinator's state machine, without I/O: events and a time in, effects out."""
