"""Our own method."""
