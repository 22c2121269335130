"""Generate completions with a policy's weights, by one of several rollout engines."""
