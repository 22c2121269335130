"""Policies: sharded models with an optimizer and a reference, which train on global batches and compute logprobs."""
