"""Weight sync: sending a sharded model's weights to rollout engines, in buckets with fingerprints."""
