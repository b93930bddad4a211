"""Checkpoints on the disk, and what is read back from them."""
