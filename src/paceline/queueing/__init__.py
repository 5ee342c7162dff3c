"""Queueing models of training throughput: mean value analysis, and a simulation of profiled steps."""
