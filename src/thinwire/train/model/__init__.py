"""Models that are trained: decoders in plain torch and Hugging Face's, their export and text from them."""
