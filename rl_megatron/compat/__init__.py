"""Other projects' import paths, answered by this package when asked to. One module, and one table, per project."""
