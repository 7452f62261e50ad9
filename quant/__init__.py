"""Weight quantisation: functions that take float arrays and return packed integer arrays.

The layouts are those of the ONNX contrib operators (block-quantised matmuls and lookup tables), so the results can be
written to a model without conversion.

This package does not depend on graphs, checkpoints or the engine, and does not access files.
"""
