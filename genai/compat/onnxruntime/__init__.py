"""The API of onnxruntime."""
