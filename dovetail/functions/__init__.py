"""The equations of reinforcement learning: pure functions, one equation each, tested on numbers."""
