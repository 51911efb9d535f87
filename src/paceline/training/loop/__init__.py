"""One rank's process: load, join the group, resume, train step by step, report."""
