"""Checkpoints of a method, and moving them to another number of ranks."""
