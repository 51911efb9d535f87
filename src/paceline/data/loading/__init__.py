"""Streaming a snapshot to ranks: shards fetched, cached, transformed, batched and prefetched."""
