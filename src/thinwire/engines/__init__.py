"""PyTorch's own engines, behind one interface: DDP, FSDP2, HSDP."""
