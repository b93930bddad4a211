"""The parts of a method and its carriers: buckets, exchanges, state, the road and the step."""
