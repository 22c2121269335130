"""Mutants of the package, and which of them the tests notice."""
