"""Kernels: the arithmetic of operators, on arrays.

Knows packed memory layouts (`weight_layout`), a NumPy meaning of every op (`reference`), compiled CPU kernels behind
typed, shape-checked functions (`cpu`), and those of them that work on whole arrays (`cpu.arrays`). Knows nothing of
operators of ONNX, graphs, models, sequences or tokenisers, and imports only `genai.common`. Importing this package does not
import Numba.
"""
