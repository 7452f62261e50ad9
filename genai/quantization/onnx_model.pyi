"""What type checkers see: at run time this is `genai.compat.onnxruntime_quantization.onnx_model`."""

from ..compat.onnxruntime_quantization.onnx_model import *  # noqa: F403
