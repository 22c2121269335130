"""Loading: compose a configuration from files and overrides, build its sections, and import the code that it names."""
