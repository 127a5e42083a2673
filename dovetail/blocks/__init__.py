"""Building blocks that several algorithms call: collecting, replaying, minibatches, options.

A block is a function, or a small frozen dataclass. An algorithm calls it; it never calls back into
the algorithm, so an algorithm's file shows its own loop.
"""
