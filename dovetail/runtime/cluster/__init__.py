"""Runs the stations of a plan as Ray actors: a second host for the same workers and links."""
