"""The fragmented dataflow graph: trace the loop, check it, cut it, print it, interpret it."""
