"""Kernels: the arithmetic of operators, on arrays.

Knows packed memory layouts (`formats`), a NumPy meaning of every op (`reference`), compiled CPU kernels behind
typed, shape-checked functions (`cpu`), and those of them that work on arrays of the host (`host`). Knows nothing of
operators of ONNX, graphs, models, sequences or tokenisers, and imports no other room. Importing this package does not
import Numba.
"""
