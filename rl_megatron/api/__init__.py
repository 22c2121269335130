"""Training from Python: functions that turn a model, data and reward functions into a configuration, and run it."""
