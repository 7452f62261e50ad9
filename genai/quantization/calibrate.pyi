"""What type checkers see: at run time this is `genai.compat.onnxruntime_quantization.calibrate`."""

from ..compat.onnxruntime_quantization.calibrate import *  # noqa: F403
