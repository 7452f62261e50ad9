"""What type checkers see: at run time this is `genai.compat.onnxruntime_quantization.quant_utils`."""

from ..compat.onnxruntime_quantization.quant_utils import *  # noqa: F403
