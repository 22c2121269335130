"""Heads of models: deferred logits for a language model, and a score per token."""
