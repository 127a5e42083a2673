"""A run: its folder, its checkpoints, and the settings of its output."""
