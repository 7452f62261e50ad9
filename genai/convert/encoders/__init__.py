"""Encoders of Hugging Face checkpoints as ONNX graphs, without PyTorch.

`spec` describes an encoder, `families` has one function per model_type that returns the description, and `graph` writes
the graph in plain ONNX operators, so that other runtimes run it, too. `build` writes the folder.
"""
