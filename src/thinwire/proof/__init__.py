"""Proofs that methods keep their word: the laws, and ranks as threads."""
