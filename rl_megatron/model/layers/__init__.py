"""Layers in plain torch, which replace Transformer Engine on the CPU and for models that it does not support."""
