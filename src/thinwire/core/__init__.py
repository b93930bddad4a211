"""What a method is made of and what carries it: buckets, exchanges, state, the road and the step."""
