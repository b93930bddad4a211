"""Optimizers that methods build on."""

from thinwire.optim.adams import AdamS

__all__ = ["AdamS"]
