"""What holds methods to their word: laws, ranks as threads, and a double of NCCL."""
