"""Hosts start the processes of workers, carry values between them, and report deaths."""
