"""What type checkers see: at run time this is `genai.compat.onnxruntime_quantization.options`."""

from ..compat.onnxruntime_quantization.options import *  # noqa: F403
