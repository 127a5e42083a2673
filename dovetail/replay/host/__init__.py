"""A replay table on the host: numpy arrays, changed in place."""
