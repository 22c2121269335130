"""Measurements to repeat; each module's docstring says what it measures and how."""
