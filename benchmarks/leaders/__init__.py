"""What the failover benchmark is made of: a cluster to break, load with a history, bytes."""
