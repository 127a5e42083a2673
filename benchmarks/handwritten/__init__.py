"""Complete training programs written by hand, to compare Dovetail with."""
