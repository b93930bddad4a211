"""One file per engine: translation only, no mathematics."""
