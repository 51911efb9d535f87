"""What one rank does: load, join the group, resume, train step by step, report."""
