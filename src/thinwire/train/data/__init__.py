"""Text on its way into a run: corpora, tokenizers, token files, windows and batches."""
