"""Tasks and environments of the shipped experiments with several turns. They also serve as examples for your own."""
