"""Quantisation of ONNX graphs of any kind: which values, their ranges, their scales, and the graph that says so.

`placement` decides which values are quantised, `calibrate` finds their ranges in a session, `parameters` makes scales
of them, `qdq` writes QuantizeLinear and DequantizeLinear, and `qoperator` joins these with the nodes between them to
operators on integers. `dynamic` needs no ranges. The arithmetic is in genai.quant, which knows no graphs.
"""
