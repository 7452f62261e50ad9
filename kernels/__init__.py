"""Kernels: the arithmetic of operators, on arrays.

Knows packed memory layouts (`formats`), a NumPy reference of every operator (`reference`), compiled CPU kernels behind
typed, shape-checked functions (`cpu`), and which kernel serves which operator (`registry`, `ops`). Knows nothing of
graphs, models, sequences or tokenisers, and imports no other room. Importing this package does not import Numba.
"""
