"""Checkpoints of a method, and what becomes of them on another number of ranks."""
