"""Low-rank adapters (LoRA) on the linear layers of a model."""
