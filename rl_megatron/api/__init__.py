"""Training from Python: functions that take a model, data and reward functions, and run what a configuration runs."""
