"""Launcher: start a gang of ranks, monitor it, and restart it after a failure."""
