"""A rollout engine of Hugging Face models in separate processes."""
