"""Policies: a sharded model with its optimizer and reference, which train on and score whole batches."""
