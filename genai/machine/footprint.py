"""What a process of this toolkit takes before it loads a model."""

# Resident memory with NumPy, onnx, Numba and all kernels; a little above what was measured on Linux.
PROGRAM_BYTES = 160 * 2**20
