"""Durable replay tables: logs, snapshots and how they are restored."""
