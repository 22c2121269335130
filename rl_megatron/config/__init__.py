"""The configuration: its sections and their documentation, the rules between keys, and loading it with Hydra."""
