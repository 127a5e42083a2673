"""Replay tables in separate processes: servers, clients, and their protocol."""
