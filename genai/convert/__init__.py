"""Convert float weights to ONNX decoder folders in the graph form of onnxruntime-genai's model builder for CPUs.

The architecture is described as data (DecoderSpec). The weights are a mapping from Hugging Face names to arrays; the
arrays are read one at a time. This package does not run, train or download models, and needs only onnx and numpy.
"""

from .build import build_model as build_model, plan_build as plan_build, resolve_model_folder as resolve_model_folder
from .folder import write_model_folder as write_model_folder
from .options import ExportOptions as ExportOptions
from .rope_scaling import Llama3Scaling as Llama3Scaling, LongRope as LongRope
from .spec import DecoderSpec as DecoderSpec
