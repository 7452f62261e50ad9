"""The modules of onnxruntime.capi from which programs import exception classes and internal functions."""
