"""The fragmented dataflow graph: traced from the loop, checked, cut, shown, interpreted."""
