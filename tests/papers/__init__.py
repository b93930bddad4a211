"""Transcriptions of the papers, and what is held against them: a package, as benchmarks have modules of these names."""
