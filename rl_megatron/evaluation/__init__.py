"""Evaluation: held-out data, named sets of problems, their statistics, and the commands `eval` and `generate`."""
