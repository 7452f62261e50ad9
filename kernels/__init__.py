"""Kernels: the arithmetic of operators, on arrays.

Knows packed memory layouts (`weight_layout`), a NumPy meaning of every op (`reference`), and compiled CPU kernels
behind typed, shape-checked functions (`cpu`; those of whole arrays in `cpu.arrays`). Knows nothing of operators of
ONNX, graphs, models, sequences or tokenisers, and imports only `genai.common`. Importing this package does not import
Numba.
"""
