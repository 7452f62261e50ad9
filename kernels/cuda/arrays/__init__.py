"""CUDA kernels as functions of arrays: what sessions call."""
