"""What answers say about who leads: two headers, written by replicas and read by clients."""

from __future__ import annotations

EPOCH_HEADER = "Paceline-Epoch"  # of the newest leader that the answering replica knows
LEADER_HEADER = "Paceline-Leader"  # its URL; absent where the replica knows none
