"""Does a layout give the loss, gradients, metrics and logprobs of one process? Measured, not argued."""
