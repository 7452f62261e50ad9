"""What type checkers see: at run time this is `genai.compat.onnxruntime_quantization.shape_inference`."""

from ..compat.onnxruntime_quantization.shape_inference import *  # noqa: F403
