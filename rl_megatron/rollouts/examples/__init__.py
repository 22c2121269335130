"""Tasks and environments of the shipped experiments with several turns, which are examples for your own."""
