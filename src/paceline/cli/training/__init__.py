"""`paceline train`, `checkpoints` and `reproduce`."""
