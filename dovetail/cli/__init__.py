"""The `dovetail` command: each of its commands is a thin line over a public function.

Nothing here imports JAX before a command needs it, so that every `--help` answers at once.
"""
