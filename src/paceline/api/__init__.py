"""The control plane as one web service: routers composed, guarded, served on one port."""
