"""A replay table on the device: pure functions over arrays."""
