"""Inspection of algorithms, plans, runs and machines: explain, analyze, doctor, interpret."""
