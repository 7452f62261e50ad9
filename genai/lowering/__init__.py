"""From an ONNX decoder graph to a program of ops: the batch made flat, and what each operator becomes."""
