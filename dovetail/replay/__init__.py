"""Replay tables."""
