"""Plans: the memory, FLOPs and time that a configuration needs on a cluster, computed without the cluster."""
