"""Operating system helpers: durable and private files, signals by pid, loopback addresses."""
