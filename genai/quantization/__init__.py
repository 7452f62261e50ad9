"""`genai.quantization` is to `genai` what `onnxruntime.quantization` is to `onnxruntime`: another name of a package.

A file, not an alias of `genai.moved` alone: threads may import it while another one imports `genai`.
"""

import sys
from importlib import import_module

import_module("genai")  # all of it: it knows the modules below
sys.modules[__name__] = import_module("genai.compat.onnxruntime_quantization")
