"""The language that CPU kernels are written in, and its compiler: Numba once, machine code from disk afterwards."""
