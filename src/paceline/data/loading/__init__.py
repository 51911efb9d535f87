"""Stream a snapshot to ranks: fetch, cache, transform, batch and prefetch shards."""
