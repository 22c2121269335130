"""Import paths of other projects, which this package provides on request: one subpackage or module per project."""
