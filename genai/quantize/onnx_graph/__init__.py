"""Quantisation of arbitrary ONNX graphs.

`placement` decides which values are quantised, `calibrate` finds their ranges in a session, `parameters` derives scales
from the ranges, `qdq` inserts QuantizeLinear and DequantizeLinear, and `qoperator` fuses those two with the nodes
between them into integer operators. `dynamic` needs no ranges. The arithmetic is in genai.quant, which does not use
graphs.
"""
