"""What carries the road into an engine or a framework: translation only, no mathematics."""
