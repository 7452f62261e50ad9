"""What type checkers see: at run time this is `genai.compat.onnxruntime_quantization.matmul_nbits_quantizer`."""

from ..compat.onnxruntime_quantization.matmul_nbits_quantizer import *  # noqa: F403
