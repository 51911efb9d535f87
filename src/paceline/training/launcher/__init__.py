"""Starting a gang of ranks, watching it, and restarting it after a failure."""
