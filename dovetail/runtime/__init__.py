"""Executes any plan; independent of algorithms and strategies."""
