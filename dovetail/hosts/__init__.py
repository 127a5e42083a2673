"""Hosts start processes, give them workers, carry channels between them, and report deaths."""
