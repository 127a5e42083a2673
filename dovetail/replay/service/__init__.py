"""Replay tables in processes of their own: servers, clients, and what they say to each other."""
