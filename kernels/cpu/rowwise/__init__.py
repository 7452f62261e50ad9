"""Native operators that work on each row separately: norms, elementwise functions, gathers.

Each module has functions that check their arguments and return a call. Operands are `Rows` (which may be parts of wider
rows) and float32 vectors, and counts come from the step's context. Each function has a machine-code operator, which is
compiled when a program first uses it. The package does not handle attributes of ONNX nodes, graphs, matmuls or
attention.
"""
