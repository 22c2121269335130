"""The kernels of the logprob operators: one module per backend with the same functions, and shared helpers."""
