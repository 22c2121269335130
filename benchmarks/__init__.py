"""Benchmarks. The docstring of each module says what it measures and how."""
