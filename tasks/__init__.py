"""Prefect tasks: name, retries and artifacts around one or two library calls."""
