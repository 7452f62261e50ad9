"""Conversion of ONNX decoder graphs to programs of ops: the batch is flattened, and each operator is lowered."""
