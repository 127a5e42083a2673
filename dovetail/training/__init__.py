"""`train` and `resume`: the public way from an algorithm to a run folder."""

from dovetail.training.train import resume, train

__all__ = ["resume", "train"]
