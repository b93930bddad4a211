"""The training program: ``thinwire train``."""
