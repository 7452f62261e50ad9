"""Operators over arrays: kernel factories, registered by (domain, operator, version).

Each module holds one family. A factory reads a node's attributes and packs its constants once; the kernel it returns
is called once per step with NumPy arrays. Heavy work is handed to `genai.kernels.cpu`; standard operators without an
entry here are borrowed from `onnx.reference` by `borrowed`. Knows nothing of models, sequences or caches.
"""
