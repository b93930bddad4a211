"""Text and what becomes of it: corpora, tokens, windows and batches."""
