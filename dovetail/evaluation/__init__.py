"""Evaluation and use of trained policies: play, evaluate, export, load."""
