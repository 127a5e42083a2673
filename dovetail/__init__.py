"""Dovetail: write a reinforcement-learning algorithm once, run it anywhere."""
