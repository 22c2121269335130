"""Record metrics, show progress, and report the results of a run."""
