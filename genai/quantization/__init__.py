"""Alias of `genai.compat.onnxruntime_quantization`, as `onnxruntime.quantization` is part of `onnxruntime`.

This is a file and not only an alias in `genai.moved`, because a thread may import it while another imports `genai`.
"""

import sys
from importlib import import_module

import_module("genai")  # completes the import of `genai`, which defines the module below
sys.modules[__name__] = import_module("genai.compat.onnxruntime_quantization")
