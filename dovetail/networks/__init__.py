"""Small networks: frozen options with pure `init` and `apply`; parameters are dicts of arrays."""
