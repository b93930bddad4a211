"""The five systems: one paper, one file."""
