"""A run: its folder, its checkpoints, and the settings by which it is watched and kept."""
