"""PyTorch's own engines, translated: DDP, FSDP2, HSDP."""
