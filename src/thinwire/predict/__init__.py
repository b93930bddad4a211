"""Prediction of step time, bytes and memory, from a recording of a method's own code and the constants of a cluster."""
