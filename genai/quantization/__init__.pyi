"""What type checkers see: at run time this is `genai.compat.onnxruntime_quantization`."""

from ..compat.onnxruntime_quantization import *  # noqa: F403
