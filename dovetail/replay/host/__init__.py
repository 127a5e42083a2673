"""A replay table on the host: numpy arrays, updated in place."""
