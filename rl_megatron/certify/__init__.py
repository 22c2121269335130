"""Certification: measure whether a parallel layout gives the loss, gradients, metrics and logprobs of one process."""
