"""Choose devices, join process groups, and lay tokens out over ranks."""
