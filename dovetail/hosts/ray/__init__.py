"""Ray as a host: processes are Ray actors on any node of a cluster."""
