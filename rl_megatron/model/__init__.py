"""Models: megatron-core models of several families, their layers, heads and shards."""
