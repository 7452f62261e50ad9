"""Kernels: the arithmetic of operators, on arrays.

The package contains the packed memory layouts (`weight_layout`), a NumPy definition of every op (`reference`), and
compiled CPU kernels behind typed, shape-checked functions (`cpu`; the kernels for whole arrays are in `cpu.arrays`).
The package does not depend on ONNX operators, graphs, models, sequences or tokenisers, and imports only `genai.common`.
Importing the package does not import Numba.
"""
