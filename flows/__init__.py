"""Prefect flows: one lifecycle verb a file; each reads like a table of contents."""
