"""Loading: compose a configuration from files and overrides, build its sections, and find what it names."""
