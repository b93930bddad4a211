"""The hot loops, one package per family of operations.

In each family ``reference`` (plain torch, any device) is the specification and the oracle of the tests, ``cpu`` (numba)
runs on CPU tensors and ``triton`` on CUDA tensors (and on CPU tensors under ``TRITON_INTERPRET=1``); the package itself
dispatches by device. numba lacks bfloat16: it arrives as uint16, and a shift widens it.
"""
