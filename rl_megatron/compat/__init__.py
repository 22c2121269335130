"""Import paths of other projects, which this package provides on request: one subpackage and table per project."""
