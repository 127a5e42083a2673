"""Drivers of the peers, each run in a virtual environment of its own."""
