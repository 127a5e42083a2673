"""`train` and `resume`: train an algorithm and write its run folder."""

from dovetail.training.train import resume, train

__all__ = ["resume", "train"]
