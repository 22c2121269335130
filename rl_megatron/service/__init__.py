"""A training service: clients send batches and get gradients, optimizer steps and samples of a model on any layout."""
