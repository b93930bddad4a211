"""The few hot loops, one package per family, one signature per operation.

In each family ``reference`` (plain torch, any device) is the specification and the oracle of the tests, ``cpu`` (numba)
the fast code for CPU tensors and ``triton`` the one for CUDA; the package itself dispatches by device.
"""
