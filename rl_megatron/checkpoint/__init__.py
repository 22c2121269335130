"""Checkpoints: saving, loading, verifying and deleting them, and conversion to and from Hugging Face directories."""
