"""Random mutations of valid configurations: each is refused with the key named, or runs for a step."""
