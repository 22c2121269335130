"""Processes that run users' and models' code: `ChildProcess`, its messages, and programs under limits."""
