"""Durable replay tables: logs, snapshots and their restoration."""
