"""The gateway: an OpenAI-compatible endpoint in front of the rollout engine, for programs that act as agents."""
