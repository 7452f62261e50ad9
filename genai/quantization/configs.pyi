"""What type checkers see: at run time this is `genai.compat.onnxruntime_quantization.configs`."""

from ..compat.onnxruntime_quantization.configs import *  # noqa: F403
