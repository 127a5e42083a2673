"""Evaluates, records, exports and loads trained policies."""
