"""A rollout engine that runs Hugging Face models in separate processes."""
