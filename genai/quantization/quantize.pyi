"""What type checkers see: at run time this is `genai.compat.onnxruntime_quantization.quantize`."""

from ..compat.onnxruntime_quantization.quantize import *  # noqa: F403
