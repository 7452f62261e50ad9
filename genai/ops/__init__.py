"""ONNX operators, one file per family: their kernels as functions of arrays, and their shape rules.

`genai.lowering` contains the rules for decoders. They determine the position of the token axis in each value, and the
op (`genai.kernels.ir`) that each node becomes.
"""
