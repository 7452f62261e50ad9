"""Writes ONNX decoder folders from float weights: the graph form that onnxruntime-genai's own builder writes for a CPU.

It knows the architecture as data (DecoderSpec), the weights as a mapping from Hugging Face names to arrays, which it
reads one at a time, and the form of the files. It does not run models, train them or download anything, and needs
onnx and numpy alone.
"""

from .build import build_model as build_model, plan_build as plan_build, resolve_model_folder as resolve_model_folder
from .folder import write_model_folder as write_model_folder
from .options import ExportOptions as ExportOptions
from .rope_scaling import Llama3Scaling as Llama3Scaling, LongRope as LongRope
from .spec import DecoderSpec as DecoderSpec
