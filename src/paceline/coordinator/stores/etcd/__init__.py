"""The coordination store in an etcd cluster (v3 API, 3.4 and later)."""
