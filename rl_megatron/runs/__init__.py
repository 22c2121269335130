"""The life of a run: its stages, checkpoints, resuming, and how it ends."""
