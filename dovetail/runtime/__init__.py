"""Runs any plan; knows no algorithm and no strategy."""
