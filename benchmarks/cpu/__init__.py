"""The contenders of ``benchmarks/cpu_bound.py``: each brings one file to N receivers."""
