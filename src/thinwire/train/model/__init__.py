"""What is trained: decoders in plain torch, Hugging Face's models, and what is made of them."""
