"""The `dovetail` command: each subcommand is a thin layer over a public function.

JAX is imported only when a command needs it, so that `--help` is fast.
"""
